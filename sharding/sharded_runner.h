// The runner of a sharded rank: gathers a unit's parameters before it runs, releases them after, and
// hands a leaf's gradient to the reduction when its last use is done. Called by TrainStep, which says
// where the leaf stands in the step.
#pragma once

#include <optional>

#include "runtime/device.h"
#include "runtime/unit_runner.h"
#include "sharding/decision.h"
#include "sharding/shard_state.h"

namespace shardrun {

class ShardedRunner : public UnitRunner {
 public:
  ShardedRunner(const Model& model, ShardState& state, const LeafPlan& leaves, Communicator& comm,
                Memory& memory, Stream& stream, RunnerOptions options);

  // Around the leaf of micro-step m of this rank (or around serving the others without one).
  void begin_micro_step(int64_t step, int64_t m);
  void end_micro_step();
  // Ends a leaf that had no backward.
  void end_leaf();
  // After the last micro-step: every SliceSum::total is complete; at stage 0 sums are gathered.
  void finish_sums();

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
    bool lingers = false;           // released, not yet freed
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
  void gradients_complete(const Unit& unit) override;
  void begin_gradients(const Unit& unit);
  void reduce(const Unit& unit);
  void reduce_segment(const Unit& unit, int segment, Tensor gradient);
  Tensor found(const Unit& unit, int segment, bool of_blocks = false) const;

  ShardState& state_;
  LeafPlan leaves_;
  Communicator& comm_;
  Memory& memory_;
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
