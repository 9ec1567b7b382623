// The order in which a leaf needs its units, so that the next ones can be gathered ahead. Found by
// running the model once on the device kind meta; called when a TrainStep is made.
#pragma once

#include <vector>

#include "sharding/shard_plan.h"

namespace shardrun {

// A unit that call number `call` of the leaf needs, as its own or as an owner of tied weights. Backward
// through a call is a call of its own.
struct UnitUse {
  int unit = 0;
  int call = 0;
};

// Of a leaf with tokens [B, T], in the order in which a runner acquires them.
std::vector<UnitUse> unit_order(const Model& model, const ShardPlan& plan, const Shape& tokens,
                                bool training);

}  // namespace shardrun
