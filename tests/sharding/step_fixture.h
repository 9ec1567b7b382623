// Runs a few steps of a tiny model on thread ranks and returns everything that must not depend on
// how the work was split: parameters, moments, printed losses and norms.
#pragma once

#include <functional>
#include <map>
#include <memory>
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
  int prefetch = 0;
  Precision precision = Precision::fp32;
  Dtype wire = Dtype::fp32;
  int64_t sum_block = 1;
  ReduceEvery reduce_every = ReduceEvery::micro_step;
  int64_t leaves = 4;
  int steps = 3;
  std::string scaler = "none";
  bool arena = false;  // plan on meta and replay, instead of plain heap memory
  int gpus = 0;        // > 0: rank r on GPU r modulo gpus, over the staged communicator
  bool nccl = false;   // or over NCCL
  Reduction reduction = Reduction::exact;
  GptConfig gpt;
  UpdateOptions update;
  int64_t left_out = -1;  // a step that is not run at all
  // Others than the GPT and SyntheticLeaves; gpt.context and gpt.vocabulary hold for them, too.
  std::function<std::unique_ptr<Model>()> make_model;
  std::function<std::unique_ptr<LeafSource>()> make_leaves;

  std::string text() const {
    return fmt::format("W={} zero={} threads={} recompute={} prefetch={} {} wire={} block={} {} "
                       "leaves={}",
                       world_size, zero, threads, recompute, prefetch, name_of(precision),
                       name_of(wire), sum_block,
                       reduce_every == ReduceEvery::step ? "step" : "micro-step", leaves);
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
  explicit SyntheticLeaves(int64_t vocabulary) : vocabulary_(vocabulary) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override;
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override;

 private:
  int64_t vocabulary_;
};

// `before_step` may set a gradient hook, change the scaler, ... on each rank; `after_step` may look.
using BeforeStep = std::function<void(TrainStep&, int rank, int64_t step)>;
using AfterStep = std::function<void(TrainStep&, int rank, int64_t step, const StepReport&)>;
StepResult run_steps(const StepCase& c, const BeforeStep& before_step = {},
                     const AfterStep& after_step = {});

// Bits of tensors, losses and norms; the place of the first difference.
void expect_same(const StepResult& expected, const StepResult& got, const std::string& what);

// Sets one element of one leaf's gradient, before it is rounded to the wire; as a gradient hook of
// one rank. The hook sees no segment's number, but sees segments in order.
struct Poison {
  int64_t leaf = 0;
  std::string parameter;
  int64_t element = 0;
  float value = 0;
  bool alone = false;  // every other element of every leaf becomes 0

  const ShardPlan* plan = nullptr;
  Stream* stream = nullptr;
  int unit = -1, segment = -1;
  int64_t place = 0;
  const Unit* seen_unit = nullptr;
  int64_t seen_leaf = -1;
  int seen = 0;

  void put_into(TrainStep& step);
};

}  // namespace shardrun::test
