// Between a training step's state and a checkpoint: what this rank brings to a save, and what it takes
// from a set that any number of ranks at any stage and precision wrote.
#pragma once

#include <vector>

#include "runtime/device.h"
#include "sharding/checkpoint/checkpoint.h"
#include "sharding/train_step.h"

namespace shardrun {

// Master (or bf16 parameter) and moments of the slices that this rank owns. They point into `step`.
std::vector<CheckpointPiece> pieces_of(TrainStep& step);

// Fetches pieces that may lie on a device, through a block of pinned memory.
class StreamSource : public PieceSource {
 public:
  explicit StreamSource(Stream& stream) : stream_(stream) {}
  const std::byte* fetch(const CheckpointPiece& piece, int64_t begin, int64_t count,
                         std::byte* scratch) override;

 private:
  Stream& stream_;
  HostBuffer pinned_;
};

// Room for a copy of those pieces, so that a save can go on while the step changes them. It is
// persistent memory under the label "save snapshot"; where there is a device, pinned memory of the
// host, made when first needed.
class StateCopy {
 public:
  StateCopy(TrainStep& step, Memory& memory, Device* device);
  // Copies now; the pieces point into the copy. The host waits for the device.
  std::vector<CheckpointPiece> take(TrainStep& step, Stream& stream);
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
  OwnedTensor owned_;
  HostBuffer pinned_;
  std::byte* data_ = nullptr;
};

// Counters and scaler; the caller adds seed, config, tokens and names.
CheckpointState state_of(const TrainStep& step, int64_t steps_done);

// DataError unless the set holds this model: names and shapes.
void check_holds(TrainStep& step, const CheckpointReader& reader, bool moments);

// Masters, moments, counters, scaler. No communication: each rank may fail alone; once all are through,
// they call ShardState::refresh_compute(...). DataError where the set does not hold this model.
void restore(TrainStep& step, CheckpointReader& reader);

// The part of it that is no tensor; `where` is for messages.
void restore_counters(TrainStep& step, const CheckpointState& saved, const std::string& where);

// Calls take(parameter, kind, begin in the parameter, tensor) for each piece of this rank's state.
void for_each_state_piece(
    TrainStep& step, bool moments,
    FunctionRef<void(const ParameterSpec&, TensorKind, int64_t begin, Tensor)> take);

// The tensor that is the truth of a parameter: the master, or what computes where there is none.
Tensor truth_of(const SegmentState& part, bool whole);

// Parameters only: for generation and fine-tuning. The same holds.
void restore_parameters(TrainStep& step, CheckpointReader& reader);

// Parameters that lie elsewhere than in a set.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  // out = elements [begin, begin + out.numel()) in model space, fp32 or bf16, on the host.
  virtual void read(const ParameterSpec& spec, int64_t begin, Tensor out) = 0;
};
void restore_parameters(TrainStep& step, ParameterSource& source);

}  // namespace shardrun
