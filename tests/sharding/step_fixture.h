// Runs a few steps of a tiny GPT on thread ranks and returns everything that must not depend on how the
// work was split: parameters, moments, printed losses and norms.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "models/gpt.h"
#include "sharding/train_step.h"

namespace shardrun::test {

struct StepCase {
  int world_size = 1;
  int zero = 3;
  int threads = 1;
  int recompute = 0;
  Precision precision = Precision::fp32;
  Dtype wire = Dtype::fp32;
  int64_t sum_block = 1;
  ReduceEvery reduce_every = ReduceEvery::micro_step;
  int64_t leaves = 4;
  int steps = 3;
  std::string scaler = "none";
  bool arena = false;      // plan on meta and replay, instead of plain heap memory
  bool one_batch = false;  // every step sees the leaves of step 0
  GptConfig gpt;

  std::string text() const {
    return fmt::format("W={} zero={} threads={} recompute={} {} wire={} block={} {} leaves={}",
                       world_size, zero, threads, recompute, name_of(precision), name_of(wire),
                       sum_block, reduce_every == ReduceEvery::step ? "step" : "micro-step", leaves);
  }
};

struct StepResult {
  std::map<std::string, std::vector<uint32_t>> tensors;  // "name/kind" -> bits in model space
  std::vector<StepReport> reports;                       // of rank 0
  std::vector<double> scales;                            // after each step
  int64_t applied = 0;
};

GptConfig tiny_gpt();

// Different tokens in every leaf of every step (or of one step, over and over); a function of (step,
// leaf) alone.
class SyntheticLeaves : public LeafSource {
 public:
  explicit SyntheticLeaves(int64_t vocabulary, bool one_batch = false)
      : vocabulary_(vocabulary), one_batch_(one_batch) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override;
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override;

 private:
  int64_t vocabulary_;
  bool one_batch_;
};

// `before_step` may set a gradient hook, change the lr, ... on each rank.
using BeforeStep = std::function<void(TrainStep&, int rank, int64_t step)>;
StepResult run_steps(const StepCase& c, const BeforeStep& before_step = {});

}  // namespace shardrun::test
