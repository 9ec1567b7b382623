// Shard plans, as arithmetic: every element has one owner, slices are whole blocks, and where a
// parameter lies does not depend on the number of ranks.
#include "sharding/shard_plan.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <set>

#include "sharding/shard_state.h"

namespace shardrun {
namespace {

struct Sizes {
  int64_t rows = 1, columns = 1, padding = 0;
  bool fp32 = false;
};

class BareUnit : public Unit {
 public:
  BareUnit(int number, const std::vector<Sizes>& parameters)
      : Unit(fmt::format("unit.{}", number)) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Sizes& p = parameters[i];
      declare({.name = fmt::format("{}.{}{}", path(), p.fp32 ? "kept" : "p", i),
               .shape = {p.rows, p.columns},
               .padded_rows = p.padding > 0 ? p.rows + p.padding : 0});
    }
  }
  Values forward(UnitCall&, std::span<const Value>) const override { return {}; }
};

class BareModel : public Model {
 public:
  explicit BareModel(const std::vector<std::vector<Sizes>>& units) {
    for (const auto& parameters : units) {
      units_.push_back(std::make_unique<BareUnit>(static_cast<int>(units_.size()), parameters));
      add(*units_.back());
    }
  }
  Loss forward(UnitRunner&, const Batch&) const override { return {}; }
  Value predict(UnitRunner&, const Value&) const override { return {}; }
  int64_t vocabulary() const override { return 1; }

 private:
  std::vector<std::unique_ptr<BareUnit>> units_;
};

ShardOptions options_for(int world) {
  return {.world_size = world,
          .zero = 3,
          .precision = Precision::bf16,
          .wire = Dtype::fp32,
          .sum_block = 1,
          .reduce_every = ReduceEvery::micro_step,
          .keep_fp32 = {"*.kept*"}};
}

// Throws what is wrong with the plan of one model over `world` ranks.
void check_plan(const BareModel& model, int world) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(fmt::format("W={}: {}", world, what));
  };
  const ShardPlan plan(model, options_for(world));
  const ShardPlan alone(model, options_for(1));
  require(plan.units().size() == model.units().size(), "units");
  for (const UnitPlan& unit : plan.units()) {
    const UnitPlan& reference = alone.unit(*unit.unit);
    require(unit.places.size() == unit.unit->parameters().size(), "a place for each parameter");
    require(unit.segments.size() == reference.segments.size(), "segments");
    require(unit.segments.empty() == unit.places.empty(), "no empty segment");
    for (size_t i = 0; i < unit.places.size(); ++i) {
      const ParameterPlace& place = unit.places[i];
      require(place.offset == reference.places[i].offset &&
                  place.segment == reference.places[i].segment,
              "an offset that depends on W");
      require(place.offset % kBlock == 0, "a parameter starts inside a block");
      require(place.numel == place.spec->shape.numel(), "numel");
    }
    for (int s = 0; s < static_cast<int>(unit.segments.size()); ++s) {
      const SegmentPlan& segment = unit.segments[static_cast<size_t>(s)];
      require(segment.slice % kBlock == 0, "a slice cuts a block");
      require(segment.full == segment.slice * world, "slices do not make up the whole");
      require(segment.used <= segment.full, "the whole is too small");
      // No more padding than blocks that do not divide.
      require(segment.full - segment.used < world * kBlock, "too much padding");
      require(segment.used == reference.segments[static_cast<size_t>(s)].used, "used depends on W");

      std::vector<std::vector<int>> owners(unit.places.size());
      for (size_t i = 0; i < owners.size(); ++i) {
        if (unit.places[i].segment == s) owners[i].resize(unit.places[i].numel);
      }
      for (int rank = 0; rank < world; ++rank) {
        const int64_t begin = rank * segment.slice;
        ShardState::for_each_piece(
            unit, s, begin, segment.slice,
            [&](const ParameterPlace& place, int64_t first, int64_t in_range, int64_t count) {
              require(first >= 0 && count > 0 && first + count <= place.numel, "piece");
              require(begin + in_range == place.offset + first, "piece lies elsewhere");
              auto& mine = owners[static_cast<size_t>(&place - unit.places.data())];
              for (int64_t e = first; e < first + count; ++e) ++mine[static_cast<size_t>(e)];
            });
      }
      int64_t before = 0;
      for (const int i : segment.places) {
        const ParameterPlace& place = unit.places[static_cast<size_t>(i)];
        require(place.offset >= before, "parameters overlap");
        before = place.offset + place.padded_numel;
        const auto& mine = owners[static_cast<size_t>(i)];
        require(std::all_of(mine.begin(), mine.end(), [](int n) { return n == 1; }),
                place.spec->name + " has an element without an owner, or with two");
        const int u = unit.unit->index();
        require(plan.find(u, s, place.offset) == &place, "find: first");
        require(plan.find(u, s, place.offset + place.numel - 1) == &place, "find: last");
        require(plan.find(u, s, place.offset + place.numel) != &place, "find: padding");
      }
      require(before <= segment.used, "a parameter past the end");
    }
  }
}

rc::Gen<Sizes> any_sizes() {
  return rc::gen::build<Sizes>(
      rc::gen::set(&Sizes::rows, rc::gen::elementOf(std::vector<int64_t>{
                                     1, 1, 2, 3, 7, 16, 31, 61, 127, 255, 256, 257})),
      rc::gen::set(&Sizes::columns,
                   rc::gen::elementOf(std::vector<int64_t>{1, 1, 1, 2, 5, 13, 64, 67})),
      rc::gen::set(&Sizes::padding, rc::gen::elementOf(std::vector<int64_t>{0, 0, 1, 64})),
      rc::gen::set(&Sizes::fp32, rc::gen::arbitrary<bool>()));
}

TEST(ShardPlan, AnyModelOverAnyWorld) {
  EXPECT_TRUE(rc::check("every element has one owner", [] {
    const auto units = *rc::gen::container<std::vector<std::vector<Sizes>>>(
        rc::gen::scale(0.15, rc::gen::container<std::vector<Sizes>>(any_sizes())));
    check_plan(BareModel(units), *rc::gen::inRange(1, 65));
  }));
}

TEST(ShardPlan, EveryWorldForTheSmallestModels) {
  const std::vector<std::vector<std::vector<Sizes>>> models = {
      {{{1, 1, 0, false}}},                     // one element
      {{{1, 1, 0, false}, {1, 1, 0, true}}},    // one in each segment
      {{}, {{1, 1, 0, false}}, {}},             // units without any parameter
      {{{251, 1, 0, false}, {257, 1, 0, false}, {65537, 1, 0, false}}},  // primes around blocks
      {{{61, 16, 3, false}}},                   // padded rows
      {{{1, 1, 300, false}, {1, 1, 0, false}}}  // more padding than a block
  };
  for (const auto& units : models) {
    const BareModel model(units);
    for (int world = 1; world <= 64; ++world) EXPECT_NO_THROW(check_plan(model, world)) << world;
  }
}

TEST(ShardPlan, RefusesStagesThatAreNot) {
  const BareModel model({{{1, 1, 0, false}}});
  for (const int zero : {-1, 4}) {
    ShardOptions options = options_for(2);
    options.zero = zero;
    EXPECT_THROW(ShardPlan(model, options), ConfigError);
  }
}

TEST(LeafPlan, EveryLeafHasOneRankAndOneMicroStep) {
  for (int world = 1; world <= 64; ++world) {
    for (int64_t leaves = 1; leaves <= 70; ++leaves) {
      for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
        ShardOptions options = options_for(world);
        options.reduce_every = every;
        options.sum_block = (leaves + world - 1) / world;
        const LeafPlan plan = plan_leaves(leaves, options);
        ASSERT_EQ(plan.micro_steps, options.sum_block);
        std::set<int64_t> seen;
        for (int64_t m = 0; m < plan.micro_steps; ++m) {
          for (int rank = 0; rank < world; ++rank) {
            const int64_t leaf = plan.leaf(m, rank);
            if (leaf < 0) continue;
            ASSERT_TRUE(seen.insert(leaf).second) << leaf;
            ASSERT_EQ(plan.rank_of(leaf), rank);
            ASSERT_EQ(plan.micro_step_of(leaf), m);
          }
        }
        ASSERT_EQ(static_cast<int64_t>(seen.size()), leaves);
        ASSERT_EQ(*seen.rbegin(), leaves - 1);
      }
    }
  }
}

TEST(LeafPlan, ReducingOnceAStepNeedsTheBlockOfARank) {
  ShardOptions options = options_for(3);
  options.reduce_every = ReduceEvery::step;
  for (int64_t block = 1; block <= 8; ++block) {
    options.sum_block = block;
    if (block == 3) {
      EXPECT_NO_THROW(plan_leaves(7, options));
    } else {
      EXPECT_THROW(plan_leaves(7, options), ConfigError) << block;
    }
  }
  options.reduce_every = ReduceEvery::micro_step;
  options.sum_block = 0;
  EXPECT_THROW(plan_leaves(7, options), ConfigError);
}

}  // namespace
}  // namespace shardrun
