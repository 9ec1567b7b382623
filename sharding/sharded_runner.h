// The runner of a sharded rank: gathers a unit's parameters before it runs, releases them after, and
// hands a leaf's gradient to the reduction when its last use is done. Called by TrainStep, which says
// where the leaf stands in the step.
//
// [Note: overlap] With Prefetch::units = N > 0 the units of the next N calls are gathered while one
// computes, and a unit's gradient is reduced while the backward of the next runs, one at a time:
//
//   compute         | fwd 0 | fwd 1 | head | bwd head | bwd 1            | bwd 0 ...
//   communication   | g 1   | g head|      | g 1      | reduce head, g 0 | reduce 1 ...
//
// Every rank gives its communication stream the same calls in the same order, with and without a
// leaf: they follow from the order of units, which is the model's. What the streams wait for is
// in [Note: lent memory].
#pragma once

#include <optional>

#include "runtime/device.h"
#include "runtime/unit_runner.h"
#include "sharding/decision.h"
#include "sharding/loan.h"
#include "sharding/shard_state.h"
#include "sharding/unit_order.h"

namespace shardrun {

// How far communication runs ahead: units 0 is not at all. The orders are asked for at stage 3 only.
struct Prefetch {
  int units = 0;
  std::vector<UnitUse> training, evaluation;
};

class ShardedRunner : public UnitRunner {
 public:
  ShardedRunner(const Model& model, ShardState& state, const LeafPlan& leaves, Communicator& comm,
                Memory& memory, const Lanes& lanes, RunnerOptions options, Prefetch prefetch);

  // Around the leaf of micro-step m of this rank (or around serving the others without one).
  void begin_micro_step(int64_t step, int64_t m);
  void end_micro_step();
  // Around a leaf that has no backward: of an evaluation (-1: this rank has none), or a prediction.
  void begin_evaluation(int64_t leaf);
  void end_leaf();
  // After the last micro-step: every SliceSum::total is complete; at stage 0 sums are gathered.
  void finish_sums();

  const Lanes& lanes() const { return lanes_; }
  // Follows what compute waits for from now on; null: nobody does.
  void set_watch(LaneWatch* watch) { lanes_.watch = watch; }

  // Before the first micro-step: forgets what was not finite.
  void begin_step();
  // [Note: where overflow waits] What a fold finds stays on the device, a place for each segment, so
  // that no micro-step waits for it. After finish_sums() fetch_overflow() sends all places on their
  // way to the host; overflow() reads them once the stream was synchronized.
  void fetch_overflow();
  Overflow overflow() const;

  ConstTensor parameter(ParameterRef ref) override;
  GradientTarget gradient(ParameterRef ref) override;

  // Called with each finished leaf gradient (fp32, whole segment) before it is rounded to the wire:
  // fault injection in tests.
  using GradientHook = void (*)(void* context, int64_t leaf, const Unit& unit, Tensor gradient);
  void set_gradient_hook(GradientHook hook, void* context) {
    hook_ = hook;
    hook_context_ = context;
  }

 private:
  struct UnitLife {
    int acquired = 0;
    bool present = false;           // gathered, or on its way
    Loan arrival;                   // until it is there
    std::vector<Buffer> gathered;   // one per segment, at stage 3
    std::vector<OwnedTensor> gradients;
    std::vector<char> touched;      // per parameter
    bool has_gradients = false;
    int first_place = 0;         // in found_: that of segment 0
    int64_t backward_order = 0;  // units whose gradient was complete before, the same in every leaf
  };

  void acquire(const Unit& unit) override;
  void release(const Unit& unit) override;
  void gather(const Unit& unit);
  void free_lingering();
  void next_use(const Unit& unit);
  std::span<const UnitUse> soon() const;
  void gradients_complete(const Unit& unit) override;
  void begin_gradients(const Unit& unit);
  void reduce(const Unit& unit);
  void reduce_segment(const Unit& unit, int segment, OwnedTensor gradient);
  void settle_reduction();
  Tensor found(const Unit& unit, int segment, bool of_blocks = false) const;

  ShardState& state_;
  LeafPlan leaves_;
  Communicator& comm_;
  Memory& memory_;
  Lanes lanes_;
  Prefetch prefetch_;
  const std::vector<UnitUse>* order_ = nullptr;  // of this leaf, where units are gathered ahead
  size_t next_ = 0;                              // the use in it that comes next
  Loan reduction_;                               // of the last unit whose gradient was complete
  KeepingMemory lent_;                           // to it
  std::vector<UnitLife> lives_;
  std::vector<const Unit*> lingering_;
  std::vector<const Unit*> waiting_;  // stage 1: complete, reduced at the end of the micro-step
  int64_t m_ = 0;
  int64_t leaf_ = -1;
  int64_t backward_order_ = 0;  // units whose gradient was complete before, in this micro-step
  int places_ = 0;              // segments of all units
  // int64: a place of each segment's leaves; reducing once a step also one of its sums of blocks.
  OwnedTensor found_;
  HostBuffer found_on_host_;
  HostBuffer nothing_found_;  // what found_ is at first
  GradientHook hook_ = nullptr;
  void* hook_context_ = nullptr;
};

}  // namespace shardrun
