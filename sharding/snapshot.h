// Between a training step's state and a checkpoint: what this rank brings to a save, and what it takes
// from a set that any number of ranks at any stage and precision wrote.
#pragma once

#include <vector>

#include "sharding/checkpoint/checkpoint.h"
#include "sharding/train_step.h"

namespace shardrun {

// Master (or bf16 parameter) and moments of the slices that this rank owns. They point into `step`.
std::vector<CheckpointPiece> pieces_of(TrainStep& step);

// Counters and scaler; the caller adds seed, config, tokens and names.
CheckpointState state_of(const TrainStep& step, int64_t steps_done);

// Masters, moments, counters, scaler. No communication: each rank may fail alone; once all are through,
// they call ShardState::refresh_compute(true, ...). DataError where the set does not hold this model.
void restore(TrainStep& step, CheckpointReader& reader);

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
