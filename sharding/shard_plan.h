// Who owns which slice: arithmetic only.
//
// [Note: flat space] The parameters of a unit lie one after another in a flat space, cut into segments of
// one compute dtype. Every parameter starts at a multiple of kBlock elements, and slices are whole blocks,
// so that no block of a sum is ever cut and the layout inside a unit does not depend on the world size;
// only the padding at the end does. Rank r owns elements [r n, (r+1) n) of each segment, n = slice.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/unit.h"
#include "sharding/precision.h"

namespace shardrun {

inline constexpr int64_t kBlock = 256;  // elements

struct ParameterPlace {
  const ParameterSpec* spec = nullptr;
  int segment = 0;
  int64_t offset = 0;         // in the segment
  int64_t numel = 0;          // model space
  int64_t padded_numel = 0;   // with padded rows
};

struct SegmentPlan {
  Dtype compute = Dtype::fp32;
  std::vector<int> places;  // indices into UnitPlan::places, by offset
  int64_t used = 0;         // a multiple of kBlock
  int64_t slice = 0;        // elements a rank owns: ceil(used / kBlock / W) blocks
  int64_t full = 0;         // slice x W
};

struct UnitPlan {
  const Unit* unit = nullptr;
  std::vector<ParameterPlace> places;  // one per Unit::parameters()
  std::vector<SegmentPlan> segments;
};

enum class ReduceEvery : bool { micro_step, step };
// exact: the canonical sum. native: the transport's own, whose bits depend on the number of ranks.
enum class Reduction : bool { exact, native };

struct ShardOptions {
  int world_size = 1;
  int zero = 3;  // 0: all replicated; 1: optimizer sharded; 2: and gradients; 3: and parameters
  Precision precision = Precision::fp32;
  Dtype wire = Dtype::fp32;  // of a leaf's gradient
  int64_t sum_block = 1;
  ReduceEvery reduce_every = ReduceEvery::micro_step;
  std::vector<std::string> keep_fp32;  // name patterns
  Reduction reduction = Reduction::exact;
};

class ShardPlan {
 public:
  ShardPlan(const Model& model, const ShardOptions& options);

  const ShardOptions& options() const { return options_; }
  const std::vector<UnitPlan>& units() const { return units_; }
  const UnitPlan& unit(const Unit& unit) const { return units_[unit.index()]; }

  // The parameter that holds element `index` of a segment; nullptr in padding.
  const ParameterPlace* find(int unit, int segment, int64_t index) const;
  std::string text() const;  // a line per unit segment

 private:
  ShardOptions options_;
  std::vector<UnitPlan> units_;
};

// How the leaves of one step fall on ranks.
struct LeafPlan {
  int64_t leaves = 1;       // L = global batch / micro-batch, rounded up
  int64_t micro_steps = 1;  // M = ceil(L / W)
  int world_size = 1;
  ReduceEvery reduce_every = ReduceEvery::micro_step;

  // The leaf of `rank` in micro-step m, -1 for none.
  int64_t leaf(int64_t m, int rank) const;
  int rank_of(int64_t leaf) const;
  int64_t micro_step_of(int64_t leaf) const;
};

// ConfigError when reducing once a step does not fit the sum blocks: exact sums need sum_block == M.
LeafPlan plan_leaves(int64_t leaves, const ShardOptions& options);

}  // namespace shardrun
