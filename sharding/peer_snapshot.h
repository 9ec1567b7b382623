// The newest step of every rank's shard in the memory of another rank's node, so that a run whose
// processes died goes on where it was, without a disk. Used by the training loop, off by default.
//
// [Note: peer snapshots] After each step rank r sends its slices to rank r + distance, which keeps
// them in files of a memory file system (/dev/shm), which outlive processes, not nodes. A file holds
// one rank's shard of one step in model space, so any number of ranks at any stage takes it back.
// Each shard has two files, for odd and even steps. One is written while the other stays; a rank
// begins the next step's only after a decision that all ranks reached, that is after all have
// finished this one's. So at any moment all parts of some step are whole: the newest or the one
// before.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "sharding/snapshot.h"

namespace shardrun {

class PeerSnapshot {
 public:
  // Makes this rank's two files below `folder`, named after the run. CannotCreateError where they do
  // not fit: each rank may fail alone. `distance` is the rank's that keeps; a world of one keeps its
  // own.
  PeerSnapshot(TrainStep& step, Communicator& comm, const std::string& run, int distance,
               const Fault& fault, const std::filesystem::path& folder);
  ~PeerSnapshot();

  // All ranks call, after a step. `state` as for a set; the fault phase "peer" is half-way.
  void take(const CheckpointState& state, Stream& stream);
  size_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A step all of whose parts were found, and where.
struct PeerSet {
  int64_t step = -1;
  struct Part {
    int holder = 0;              // the rank that has it
    std::filesystem::path path;  // there
  };
  std::vector<Part> parts;  // empty: nothing was found
};

// All ranks call; `looks` on one rank of each node. The newest step of the run of which every part is
// there and sound.
PeerSet find_peer_snapshot(const std::string& run, bool looks, Communicator& comm,
                           const std::filesystem::path& folder);

// Masters, moments, counters, scaler, as restore() does; returns the state. All ranks call; every
// part passes all ranks in blocks, which are all the memory that it takes. DataError where the parts
// hold another model or dtype; ranks may fail alone.
CheckpointState restore(TrainStep& step, const PeerSet& set, Communicator& comm, Stream& stream);

// Removes what this node keeps of the run: it is over, or on the disk.
void remove_peer_snapshots(const std::string& run, const std::filesystem::path& folder);

}  // namespace shardrun
