// The training step of one rank: from a global batch to an updated shard. All ranks call with the same
// options; the result has the same bits for every world size, stage and way of reducing.
#pragma once

#include <memory>
#include <string>

#include "sharding/batch_feed.h"
#include "sharding/decision.h"
#include "sharding/exposed_clock.h"
#include "sharding/loss_scaler.h"
#include "sharding/shard_state.h"
#include "sharding/sharded_runner.h"
#include "sharding/step_tally.h"

namespace shardrun {

// Where leaves come from. Deterministic: the same (step, leaf) gives the same data on every rank.
class LeafSource {
 public:
  virtual ~LeafSource() = default;
  // tokens, targets: int32 [micro_batch, seq_len], host memory.
  virtual void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) = 0;
  virtual void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) = 0;
};

struct StepOptions {
  ShardOptions shard;
  UpdateOptions update;
  uint64_t seed = 1;
  int64_t micro_batch = 1;   // sequences in a leaf
  int64_t global_batch = 1;  // sequences in a step, a multiple of micro_batch
  int64_t seq_len = 1;
  int recompute_every = 0;
  // Units gathered ahead, and gradients reduced while the next backward runs: [Note: overlap]. It changes
  // time and memory, no bits. Without partners nothing is ahead.
  int prefetch = 0;
};

struct StepReport {
  Decision decision;
  LossScaler::Event scaler;
  double loss_scale = 1;      // that backward used
  // Time for which this rank's computation stood still for tensors of other ranks, since the last
  // report: the waits of the last micro-step times their number, and those after it.
  double exposed_seconds = 0;
  std::string overflow_text;  // "h.3.mlp.c_fc.weight[17] is inf on rank 2, micro-step 1, leaf 5"
};

struct Evaluation {
  double loss = 0;  // mean over valid items
  int64_t valid = 0;
};

class TrainStep {
 public:
  TrainStep(const Model& model, const StepOptions& options, const std::string& scaler_policy,
            Communicator& comm, Memory& memory, Stream& stream);
  ~TrainStep();  // waits for the device, which may still read memory that goes
  TrainStep(const TrainStep&) = delete;

  void initialize();
  // Step number `step` counts global batches from 0; lr of this update.
  // What this rank asks for and tells travels in the decision.
  StepReport operator()(int64_t step, double lr, LeafSource& source, bool stop_request = false,
                        bool writer_quiet = false);
  // Mean loss over evaluation leaves [0, leaves).
  Evaluation evaluate(int64_t leaves, LeafSource& source);
  // Logits of one batch, fp32 [B, T, vocabulary], for every rank alike. Both on the host.
  void predict(Tensor logits, ConstTensor tokens);

  int64_t applied_steps() const { return applied_steps_; }
  void set_applied_steps(int64_t n) { applied_steps_ = n; }
  LossScaler& scaler() { return scaler_; }
  const LossScaler& scaler() const { return scaler_; }
  ShardState& state() { return *state_; }
  ShardedRunner& runner() { return *runner_; }
  const LeafPlan& leaves() const { return leaves_; }
  const StepOptions& options() const { return options_; }

 private:
  void sum_squares();
  // Everything that the step left on the device comes to the host: its one wait.
  void collect(StepRecord& record);
  void update(int64_t step, double lr, const Decision& decision);
  std::string describe(const Overflow& overflow) const;

  const Model& model_;
  StepOptions options_;
  ShardPlan plan_;
  LeafPlan leaves_;
  Communicator& comm_;
  Memory& memory_;
  Stream& stream_;
  std::unique_ptr<Stream> communication_;  // a GPU's second stream, where the two overlap
  LossScaler scaler_;
  std::unique_ptr<ShardState> state_;
  std::unique_ptr<ShardedRunner> runner_;
  ExposedClock clock_;
  Loan copies_;  // of units that were updated, to the gathers of their whole copies
  StepTally tally_;
  BatchFeed feed_;
  HostBuffer predicted_;  // on a GPU tokens and logits on their way; made when first needed
  int64_t applied_steps_ = 0;
  double leaf_nominal_ = 1;
};

}  // namespace shardrun
