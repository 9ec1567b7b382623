#include "sharding/shard_plan.h"

#include <algorithm>

namespace shardrun {

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static int segment_for(UnitPlan& unit, Dtype compute) {
  for (size_t i = 0; i < unit.segments.size(); ++i) {
    if (unit.segments[i].compute == compute) return static_cast<int>(i);
  }
  unit.segments.push_back({.compute = compute, .places = {}});
  return static_cast<int>(unit.segments.size()) - 1;
}

ShardPlan::ShardPlan(const Model& model, const ShardOptions& options) : options_(options) {
  SHARDRUN_CHECK(options.world_size >= 1, "world size {}", options.world_size);
  if (options.zero < 0 || options.zero > 3) {
    throw ConfigError("--zero: got {}, wanted 0, 1, 2 or 3", options.zero);
  }
  for (const Unit* unit : model.units()) {
    UnitPlan plan;
    plan.unit = unit;
    for (const ParameterSpec& spec : unit->parameters()) {
      if (!spec.trainable) {
        throw ConfigError("{}: frozen parameters cannot be trained with shards in this version",
                          spec.name);
      }
      const bool fp32 = matches_any(options.keep_fp32, spec.name);
      ParameterPlace place;
      place.spec = &spec;
      place.segment = segment_for(plan, fp32 ? Dtype::fp32 : compute_dtype(options.precision));
      place.numel = spec.shape.numel();
      place.padded_numel = spec.padded_shape().numel();
      SegmentPlan& segment = plan.segments[place.segment];
      place.offset = segment.used;
      segment.used += round_up(place.padded_numel, kBlock);
      segment.places.push_back(static_cast<int>(plan.places.size()));
      plan.places.push_back(place);
    }
    for (SegmentPlan& segment : plan.segments) {
      const int64_t blocks = segment.used / kBlock;
      segment.slice = (blocks + options.world_size - 1) / options.world_size * kBlock;
      segment.full = segment.slice * options.world_size;
    }
    units_.push_back(std::move(plan));
  }
}

const ParameterPlace* ShardPlan::find(int unit, int segment, int64_t index) const {
  for (const ParameterPlace& place : units_[unit].places) {
    if (place.segment == segment && index >= place.offset && index < place.offset + place.numel) {
      return &place;
    }
  }
  return nullptr;
}

std::string ShardPlan::text() const {
  std::string out;
  for (const UnitPlan& unit : units_) {
    for (const SegmentPlan& segment : unit.segments) {
      out += fmt::format("{:<12} {:<5} {:>12} elements in {:>3} parameters, {:>12} a rank, {} padding\n",
                         unit.unit->path(), name_of(segment.compute), segment.used,
                         segment.places.size(), segment.slice, segment.full - segment.used);
    }
  }
  return out;
}

int64_t LeafPlan::leaf(int64_t m, int rank) const {
  const int64_t leaf = reduce_every == ReduceEvery::step ? rank * micro_steps + m
                                                         : m * world_size + rank;
  return leaf < leaves ? leaf : -1;
}

int LeafPlan::rank_of(int64_t leaf) const {
  return static_cast<int>(reduce_every == ReduceEvery::step ? leaf / micro_steps
                                                            : leaf % world_size);
}

int64_t LeafPlan::micro_step_of(int64_t leaf) const {
  return reduce_every == ReduceEvery::step ? leaf % micro_steps : leaf / world_size;
}

LeafPlan plan_leaves(int64_t leaves, const ShardOptions& options) {
  SHARDRUN_CHECK(leaves >= 1, "{} leaves in a step", leaves);
  LeafPlan plan;
  plan.leaves = leaves;
  plan.world_size = options.world_size;
  plan.reduce_every = options.reduce_every;
  plan.micro_steps = (leaves + options.world_size - 1) / options.world_size;
  if (options.sum_block < 1) throw ConfigError("--sum-block: got {}, wanted >= 1", options.sum_block);
  if (options.reduce_every == ReduceEvery::step && options.reduction == Reduction::exact &&
      options.sum_block != plan.micro_steps) {
    throw ConfigError(
        "--reduce-every step: sums of {} leaves on each of {} ranks need --sum-block {}, got {}; set it, "
        "or use --reduce-every micro-step",
        plan.micro_steps, options.world_size, plan.micro_steps, options.sum_block);
  }
  return plan;
}

}  // namespace shardrun
