// What one rank keeps between steps: master and moments of its slices, the compute copy, the gradient
// accumulators. Which of them are whole and which are slices is the ZeRO stage, as data:
//
//   stage   compute copy   master, moments   gradient sum
//     0        whole           whole         slice, gathered for the update
//    1, 2      whole           slice         slice
//     3        slice           slice         slice
//
// In fp32 the master is what computes: at stages 0 to 2 its slice lies inside the whole copy.
#pragma once

#include <vector>

#include "comm/communicator.h"
#include "kernels/adamw.h"
#include "sharding/shard_plan.h"

namespace shardrun {

// Hyper-parameters of an optimizer that vary by name: decay is for matrices by default.
struct UpdateOptions {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
  double grad_clip = 1.0;  // 0: none
};
bool is_decayed(const ParameterSpec& spec);  // two and more dimensions

struct SegmentState {
  const SegmentPlan* plan = nullptr;
  int64_t state_begin = 0;      // master and moments cover [state_begin, state_begin + state_size)
  int64_t state_size = 0;
  Tensor compute_full;          // stages 0..2; at stage 3 only while gathered
  Tensor compute_slice;         // this rank's part of the compute copy
  Tensor master;                // absent in bf16-true
  Tensor moment1, moment2;
  SliceSum sum;                 // gradient accumulators of the slice
  Tensor sum_full;              // stage 0: the gathered sum, `sum.total` is a part of it
  Tensor block_full;            // reduce-every step: this rank's block of leaves, whole
  std::vector<kernels::AdamwRange> ranges;  // over the state's range
};

struct UnitState {
  const UnitPlan* plan = nullptr;
  std::vector<SegmentState> segments;
};

class ShardState {
 public:
  ShardState(const ShardPlan& plan, const UpdateOptions& options, uint64_t seed, int rank,
             Memory& memory);

  // Sets initial values: a function of (seed, name, element), whatever the shards.
  void initialize(Communicator& comm, Stream& stream);
  // After masters were loaded: makes the compute copies from them, whole ones at stages 0 to 2.
  void refresh_compute(Communicator& comm, Stream& stream);
  // After a unit's slices changed: gathers its whole copy. Stages 1 and 2.
  static void gather_compute(UnitState& unit, Communicator& comm, Stream& stream);
  bool gathers_compute() const { return plan_.options().zero == 1 || plan_.options().zero == 2; }

  const ShardPlan& plan() const { return plan_; }
  std::vector<UnitState>& units() { return units_; }
  const std::vector<UnitState>& units() const { return units_; }
  uint64_t seed() const { return seed_; }
  int rank() const { return rank_; }

  // Calls visit(place, state, begin in parameter, begin in state tensors, count) for each piece of a
  // parameter (model space) inside [begin, begin + size) of the segment.
  static void for_each_piece(
      const UnitPlan& unit, int segment, int64_t begin, int64_t size,
      FunctionRef<void(const ParameterPlace&, int64_t in_parameter, int64_t in_range, int64_t count)>
          visit);

 private:
  Tensor keep(Dtype dtype, int64_t n, const char* label);

  const ShardPlan& plan_;
  uint64_t seed_;
  int rank_;
  Memory& memory_;
  std::vector<Buffer> buffers_;
  std::vector<UnitState> units_;
};

}  // namespace shardrun
