// Checkpoints: saved by the training loop, read by resuming, generating and `shardrun checkpoint`.
// A set is a folder OUT/checkpoints/step-00000100/ of
//
//   manifest.pb        state; where each chunk lies, and its XXH3-64; last, the manifest's own
//   manifest.txt       the same for people, never read
//   data-00000.bin     chunks: [begin, end) of one tensor in model space, at most 4 MiB each
//
// in little endian. Ranks, stages and devices are not in it, so any of them loads any set.
// OUT/checkpoints/latest is a link to the set written last, for people; nothing here reads it.
//
// [Note: commit] Everything is written in a dot folder beside the sets, each file and folder is
// synced, all ranks agree, one rename makes it a set, the parent is synced. Whatever fails or dies
// before the rename leaves the sets as they were; dot folders are never read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/fault.h"
#include "runtime/tensor.h"

namespace shardrun {

enum class TensorKind : uint8_t { master, moment1, moment2, buffer };
const char* name_of(TensorKind kind);

// What one rank brings: elements [begin, begin + data.numel()) of a tensor in model space. `data`
// is fp32 or, for a master in bf16-true, bf16; on the host, or wherever SaveOptions::source fetches
// it from. Pieces of all ranks together hold each element of each (name, kind) once: what is
// replicated is brought by one rank.
struct CheckpointPiece {
  std::string name;
  TensorKind kind = TensorKind::master;
  Shape shape;  // of the whole tensor
  int64_t begin = 0;
  ConstTensor data;
};

// Brings pieces to the host, a block at a time: from a device, from another file.
class PieceSource {
 public:
  static constexpr int64_t kMostBytes = int64_t{256} << 10;
  virtual ~PieceSource() = default;
  // Elements [begin, begin + count) of piece.data, kMostBytes at most, in `scratch` (as large) or
  // elsewhere, until the next call. One thread at a time, not always the same.
  virtual const std::byte* fetch(const CheckpointPiece& piece, int64_t begin, int64_t count,
                                 std::byte* scratch) = 0;
};

// What is not a tensor. Numbers come back with the same bits.
struct CheckpointState {
  int64_t step = 0;           // global batches consumed
  int64_t applied_steps = 0;  // updates
  int64_t tokens = 0;
  int64_t skipped = 0;
  int64_t skipped_in_a_row = 0;
  std::string scaler_policy;
  std::map<std::string, int64_t> scaler_counts;  // the scaler's own names
  std::map<std::string, double> scaler_numbers;
  uint64_t seed = 0;
  std::string precision;
  std::string numerics_key;
  std::string config_text;  // textproto
  std::string writer_version;
  // The samples of the run are one endless order; "sample" is the number of the next one. Empty in
  // old sets: step x global batch.
  std::map<std::string, int64_t> data_position;
  std::string schedule;  // of the learning rate, as text; its place is applied_steps
  std::string run;       // the run that wrote the set; rotation leaves others' sets alone

  friend bool operator==(const CheckpointState&, const CheckpointState&) = default;
};

// All ranks call, with the same `out` (on a file system that they share) and `state` (rank 0's is
// written). Returns the folder of the set. A set of the same step is replaced: the two folders are
// exchanged in one rename where the file system can, else the old one steps aside first.
// On failure every rank throws the same error, that of the lowest failing rank with its number:
// IoError for files, DataError where a master or moment is not finite, a tensor has a gap, an
// overlap or two shapes. Memory: one block of the source's, whatever the size of the pieces.
struct SaveOptions {
  PieceSource* source = nullptr;       // null: pieces lie on the host
  const Fault* fault = nullptr;        // runtime/fault.h lists the phases
  std::function<void()> after_commit;  // on rank 0, once the set is on the disk: rotation
};
std::string save_checkpoint(const std::filesystem::path& out, const CheckpointState& state,
                            std::span<const CheckpointPiece> mine, Communicator& comm,
                            const SaveOptions& options = {});

// The same beside training. All ranks make it at the same step boundary, the next one once this one
// is through; `pieces` must stay as they are until then. [Note: who talks] in background.cpp.
class BackgroundSave {
 public:
  // Throws what save_checkpoint throws before a byte is written.
  BackgroundSave(const std::filesystem::path& out, const CheckpointState& state,
                 std::vector<CheckpointPiece> pieces, Communicator& comm,
                 const SaveOptions& options = {});
  ~BackgroundSave();  // waits for this rank's writer; a set that is not committed goes

  // This rank's writer has nothing to do until the others are as far.
  bool quiet() const;
  // All ranks call, at a step boundary, best once all are quiet: it waits for this rank's writer.
  // True: the set is committed. Throws what save_checkpoint throws, the same on all ranks.
  bool advance();
  void wait() {
    while (!advance()) {
    }
  }
  double seconds() const;  // that this rank's writer was at work, once quiet
  const std::filesystem::path& folder() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The complete set with the largest step below OUT/checkpoints. Complete: a sound manifest and each
// data file there at its full size.
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& out);

// Every folder there that is named like a set, by rising step; complete or not, to be tried.
std::vector<std::filesystem::path> named_checkpoints(const std::filesystem::path& out);

// What OUT/checkpoints/latest names, there or not; "" without one.
std::string latest_name(const std::filesystem::path& out);

// Complete sets below OUT/checkpoints by rising step.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& out);

// One rank calls, after a save. Removes complete sets but the `keep_last` with the largest steps
// (0: all stay) and those whose step is a multiple of `keep_every` (0: none more), and what broken
// saves left. Steps above `current_step` (when given) are neither counted nor removed: a run
// resumed from an older set must not lose what it just wrote. Sets whose state names another run
// than `run`, and sets that are not complete, which stay for a person to look at, are not counted
// either. IoError where a set cannot be removed.
void rotate_checkpoints(const std::filesystem::path& out, int64_t keep_last, int64_t keep_every,
                        const std::string& run, int64_t current_step = -1);

// Before a run's first step: rank 0 creates OUT/checkpoints; every rank creates, writes, syncs and
// renames a file in it, looks for others' files, and all are removed. `bytes` is what a set will
// take; where less is free that is an error now and not after the first hours. All ranks call.
// `on_all_ranks` runs an action of which each rank may fail alone, with CannotCreateError, and goes
// on when all are through.
void probe_checkpoints(const std::filesystem::path& out, int64_t bytes, int rank, int ranks,
                       FunctionRef<void(FunctionRef<void()>)> on_all_ranks);

// Reads one set. Every size in the manifest is held against the files when opened; the bytes of a
// chunk against its XXH3-64 the first time that it is touched. One thread.
class CheckpointReader {
 public:
  struct TensorInfo {
    std::string name;
    TensorKind kind;
    Shape shape;
    Dtype dtype;
  };

  // `path` is a set's folder, or an OUT folder: its newest complete set. NoInputError where there
  // is none or a file is missing, DataError where content is wrong.
  static CheckpointReader open(const std::filesystem::path& path);
  CheckpointReader(CheckpointReader&&) noexcept;
  CheckpointReader& operator=(CheckpointReader&&) noexcept;
  ~CheckpointReader();

  const std::filesystem::path& folder() const;
  const CheckpointState& state() const;
  const std::vector<TensorInfo>& tensors() const;  // one per (name, kind), in that order
  const TensorInfo* find(const std::string& name, TensorKind kind) const;
  // The same, DataError where it is missing or has another shape.
  const TensorInfo& expect(const std::string& name, TensorKind kind, const Shape& shape) const;

  // out = elements [begin, begin + out.numel()), on the host. Same dtype, or fp32 from bf16 (exact)
  // or bf16 from fp32 (to nearest even). DataError for a missing tensor, a range outside it, wrong
  // bytes; `out` then holds anything.
  void read(const std::string& name, TensorKind kind, int64_t begin, Tensor out);

 private:
  friend std::vector<std::string> verify_checkpoint(const std::filesystem::path& path);
  struct Impl;
  explicit CheckpointReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// XXH3-128 as 32 hex digits; `path` as for open. [Note: checkpoint hash] Each tensor's values in
// model space are cut into pieces of 1 MiB; the digests of the pieces in order give the tensor's.
// The tensors' in order of name and kind, each with name, kind, dtype and shape, and then the
// counters by name (step, applied_steps, tokens, skipped, skipped_in_a_row, scaler state, seed)
// give the checkpoint's. World size, stage, device, chunks, files, paths and config have no part.
std::string checkpoint_hash(const std::filesystem::path& path);

// All that is wrong with a set, one sentence each; empty: sound. Reads every byte.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& path);

}  // namespace shardrun
