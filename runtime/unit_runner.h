// Runs a model's units: forward, recording, recomputation, backward. What happens around a unit (where
// parameters come from, where gradients go) is left to a subclass: PlainRunner here keeps everything
// on one rank, sharding/sharded_runner.h gathers and reduces.
#pragma once

#include <memory>
#include <vector>

#include "runtime/unit.h"

namespace shardrun {

struct LeafPosition {
  int64_t step = 0;
  int64_t leaf = 0;
};

struct RunnerOptions {
  uint64_t seed = 1;
  Dtype activation_dtype = Dtype::fp32;
  int recompute_every = 0;  // 0: never; k: every k-th unit drops its tape and runs again in backward
};

class UnitRunner : public ParameterStore {
 public:
  UnitRunner(const Model& model, Memory& memory, Stream& stream, GradientMath math,
             RunnerOptions options);

  // Runs one unit. `owners` are units whose parameters it also uses (tied weights).
  Values operator()(const Unit& unit, std::initializer_list<Value> inputs,
                    std::initializer_list<const Unit*> owners = {});

  bool training() const { return training_; }
  // Before each leaf: training records and drops out, otherwise neither.
  void begin_leaf(LeafPosition position, bool training);
  // d(loss sum) / d(everything), times seed. Ends the leaf.
  void backward(const Loss& loss, float seed);

  Stream& stream() const { return stream_; }
  ValuePool& pool() { return pool_; }
  Dtype activation_dtype() const { return options_.activation_dtype; }
  RandomKey random_key(const Unit& unit, int use, uint64_t ordinal) const;
  const Model& model() const { return model_; }

 protected:
  // Hooks. acquire: parameters of the unit must be readable until release.
  virtual void acquire(const Unit& unit) = 0;
  virtual void release(const Unit& unit) = 0;
  // The unit's leaf gradient has received its last use.
  virtual void gradients_complete(const Unit& unit) = 0;

 private:
  struct Call {
    const Unit* unit = nullptr;
    int use = 0;
    std::array<const Unit*, 2> owners{};
    ValueIds inputs;        // as handed in, shared with other calls
    ValueIds inner_inputs;  // the same tensors, gradients of this call only
    ValueIds outputs;
    Values kept_inputs;     // only when dropped: what forward runs on again
    Tape tape;
    bool dropped = false;
  };
  Values run_forward(Call& call, std::span<const Value> inputs, Tape* tape);
  void backward_through(Call& call, float seed);
  void for_each_unit(const Call& call, void (UnitRunner::*hook)(const Unit&));
  void count_down(const Unit& unit);

  const Model& model_;
  Stream& stream_;
  RunnerOptions options_;
  ValuePool pool_;
  std::vector<std::unique_ptr<Call>> calls_;  // reused from leaf to leaf
  int call_count_ = 0;
  std::vector<int> uses_;       // per unit: calls so far in this leaf
  std::vector<int> remaining_;  // per unit: uses, as unit or owner, whose backward is still to come
  LeafPosition position_;
  bool training_ = false;
};

}  // namespace shardrun
