// The stages of a save, one rank's part of each. Used inside this folder: save.cpp runs them one
// after another, background.cpp runs the second and third on a thread of their own.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "manifest.pb.h"
#include "sharding/checkpoint/checkpoint.h"
#include "sharding/checkpoint/file.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/checkpoint/manifest.h"

namespace shardrun {

class SaveJob {
 public:
  SaveJob(const std::filesystem::path& out, CheckpointState state,
          std::vector<CheckpointPiece> mine, int rank, SaveOptions options);

  void prepare();                          // rank 0: an empty folder to build in
  void write(checkpoint::Report& report);  // this rank's data file, synced
  // With all ranks' reports. Rank 0: manifest, rename, `latest`, and what follows a commit.
  void commit(const std::vector<checkpoint::Report>& reports);
  void clean_up() noexcept;  // after a failure

  const std::filesystem::path& folder() const { return final_; }

 private:
  FaultKind fault(const char* phase) const;

  std::filesystem::path parent_, building_, final_;
  CheckpointState state_;
  std::vector<CheckpointPiece> mine_;
  int rank_;
  SaveOptions options_;
};

// What became of `stage` here. [Note: agreement] in save.cpp.
checkpoint::Report run_guarded(FunctionRef<void(checkpoint::Report&)> stage);

// All ranks' reports, or the same error on every rank. All ranks call.
std::vector<checkpoint::Report> exchange(Communicator& comm, const checkpoint::Report& mine);

}  // namespace shardrun
