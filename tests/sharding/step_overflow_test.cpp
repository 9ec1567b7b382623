// A gradient that is not finite, anywhere: every rank skips the step, nothing but the scaler moves,
// the report names the place, and what follows is as if the step had never been.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kernels/loss.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kBadStep = 1;

GptConfig small_gpt() {
  GptConfig gpt = tiny_gpt();
  gpt.layers = 1;
  gpt.channels = 16;
  gpt.context = 8;
  return gpt;
}

// All that a skipped step has to leave alone on this rank.
std::vector<std::byte> kept_by(TrainStep& step) {
  std::vector<std::byte> bytes;
  for (UnitState& unit : step.state().units()) {
    for (SegmentState& part : unit.segments) {
      for (const Tensor* tensor : {&part.master, &part.moment1, &part.moment2, &part.compute_slice,
                                   &part.compute_full}) {
        if (!tensor->present()) continue;
        const auto* data = static_cast<const std::byte*>(tensor->data());
        bytes.insert(bytes.end(), data, data + tensor->bytes());
      }
    }
  }
  return bytes;
}

struct Numbers {
  Precision precision;
  Dtype wire;
  double scale;  // at first; fp16 alone has the default policy
};

class StepOverflow : public testing::TestWithParam<Numbers> {
 protected:
  // 7 leaves over 5 ranks: the second micro-step has two leaves and three idle ranks. Reduced once
  // a step, rank 3 has half a block and rank 4 nothing.
  StepCase case_of(int zero, ReduceEvery every) const {
    StepCase c;
    c.gpt = small_gpt();
    c.precision = GetParam().precision;
    c.wire = GetParam().wire;
    c.scaler = scales() ? "default" : "none";
    c.zero = zero;
    c.world_size = 5;
    c.leaves = 7;
    c.sum_block = 2;
    c.steps = 4;
    c.reduce_every = every;
    return c;
  }
  bool scales() const { return GetParam().precision == Precision::fp16; }

  void start(TrainStep& step, int64_t s) const {
    if (s > 0 || !scales()) return;
    ScalerState state = step.scaler().state();
    state.scale = GetParam().scale;
    step.scaler().restore(state);
  }

  // The run without the bad step, with the scaler that it would have left.
  StepResult undisturbed(StepCase c) const {
    c.left_out = kBadStep;
    return run_steps(c, [&](TrainStep& step, int, int64_t s) {
      start(step, s);
      if (s != kBadStep + 1 || !scales()) return;
      ScalerState state = step.scaler().state();
      state.scale /= 2;
      state.good_steps = 0;
      step.scaler().restore(state);
    });
  }

  void expect_skipped(const StepCase& c, Poison poison, const std::string& text,
                      const StepResult& expected) {
    const std::string what = fmt::format("{}: {}", c.text(), text);
    std::vector<Poison> poisons(static_cast<size_t>(c.world_size), poison);
    std::vector<std::vector<std::byte>> before(static_cast<size_t>(c.world_size));
    std::vector<int> skips(static_cast<size_t>(c.world_size));
    const StepResult got = run_steps(
        c,
        [&](TrainStep& step, int rank, int64_t s) {
          start(step, s);
          step.runner().set_gradient_hook(nullptr, nullptr);
          if (s != kBadStep) return;
          before[static_cast<size_t>(rank)] = kept_by(step);
          poisons[static_cast<size_t>(rank)].put_into(step);
        },
        [&](TrainStep& step, int rank, int64_t s, const StepReport& report) {
          if (s != kBadStep) {
            EXPECT_TRUE(report.decision.apply()) << what << ", step " << s << ", rank " << rank;
            EXPECT_EQ(report.overflow_text, "");
            return;
          }
          skips[static_cast<size_t>(rank)] = 1;
          EXPECT_EQ(report.decision.outcome, Outcome::overflow) << what << ", rank " << rank;
          EXPECT_EQ(report.overflow_text, text) << "rank " << rank;
          EXPECT_EQ(report.loss_scale, GetParam().scale);
          EXPECT_EQ(step.scaler().scale(), GetParam().scale / (scales() ? 2 : 1))
              << what << ", rank " << rank;
          EXPECT_EQ(step.scaler().consecutive_skips(), 1);
          EXPECT_EQ(step.applied_steps(), kBadStep) << what << ", rank " << rank;
          EXPECT_TRUE(kept_by(step) == before[static_cast<size_t>(rank)])
              << what << ", rank " << rank;
        });
    EXPECT_EQ(std::count(skips.begin(), skips.end(), 1), c.world_size);
    EXPECT_EQ(got.applied, c.steps - 1) << what;
    StepResult rest = got;
    ASSERT_EQ(rest.reports.size(), static_cast<size_t>(c.steps));
    rest.reports.erase(rest.reports.begin() + kBadStep);
    expect_same(expected, rest, what);
  }
};

// Every leaf, and so every rank and micro-step; each kind; the first and last element of a
// parameter that every rank holds a part of, and of one that the last ranks hold nothing of.
TEST_P(StepOverflow, AnywhereSkipsEverywhere) {
  struct Place {
    const char* parameter;
    int64_t element;
  };
  const Place places[] = {{"wte.weight", 0},
                          {"wte.weight", 61 * 16 - 1},
                          {"h.0.ln_1.weight", 15},
                          {"h.0.mlp.c_proj.bias", 15},
                          {"ln_f.bias", 0}};
  const float values[] = {kInf, -kInf, kNan};
  int64_t turn = 0;
  for (const int zero : {0, 1, 2, 3}) {
    for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
      const StepCase c = case_of(zero, every);
      const StepResult expected = undisturbed(c);
      LeafPlan plan{.leaves = 7, .micro_steps = 2, .world_size = 5, .reduce_every = every};
      for (int64_t leaf = 0; leaf < c.leaves; ++leaf) {
        for (const Place& place : places) {
          const float value = values[turn++ % 3];
          const Poison poison{
              .leaf = leaf, .parameter = place.parameter, .element = place.element, .value = value};
          const std::string text =
              fmt::format("gradient of {}[{}] is {} on rank {}, micro-step {}, leaf {}",
                          place.parameter, place.element, value != value ? "nan" : "inf",
                          plan.rank_of(leaf), plan.micro_step_of(leaf), leaf);
          expect_skipped(c, poison, text, expected);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// More ranks than the whole model has blocks in any unit: most own nothing, and still tell and
// hear.
TEST_P(StepOverflow, OfARankThatOwnsNothing) {
  for (const int zero : {0, 1, 2, 3}) {
    StepCase c = case_of(zero, ReduceEvery::micro_step);
    c.world_size = 40;
    c.leaves = 41;
    const StepResult expected = undisturbed(c);
    for (const int64_t leaf : {0, 39, 40}) {
      const float value = leaf == 39 ? kNan : kInf;
      const std::string text =
          fmt::format("gradient of ln_f.weight[3] is {} on rank {}, micro-step {}, leaf {}",
                      leaf == 39 ? "nan" : "inf", leaf % 40, leaf / 40, leaf);
      expect_skipped(
          c, {.leaf = leaf, .parameter = "ln_f.weight", .element = 3, .value = value}, text,
          expected);
    }
  }
}

// Finite in fp32 and not in the wire's dtype.
TEST_P(StepOverflow, OnTheWire) {
  StepCase c = case_of(3, ReduceEvery::micro_step);
  const Poison poison{.leaf = 4, .parameter = "wpe.weight", .element = 7, .value = 1e6f};
  if (c.wire == Dtype::fp16) {
    expect_skipped(c, poison, "gradient of wpe.weight[7] is inf on rank 4, micro-step 0, leaf 4",
                   undisturbed(c));
    return;
  }
  std::vector<Poison> poisons(static_cast<size_t>(c.world_size), poison);
  const StepResult got = run_steps(c, [&](TrainStep& step, int rank, int64_t) {
    poisons[static_cast<size_t>(rank)].put_into(step);
  });
  EXPECT_EQ(got.applied, c.steps);
}

// Each leaf is finite, their sum is not: found where it is added up.
TEST_P(StepOverflow, OfASumOfFiniteLeaves) {
  if (GetParam().wire == Dtype::fp16) GTEST_SKIP() << "sums travel fp32, leaves stay far below";
  for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
    const StepCase c = case_of(2, every);
    std::vector<Poison> poisons(static_cast<size_t>(c.world_size));
    const StepResult got = run_steps(
        c, [&](TrainStep& step, int rank, int64_t s) {
          step.runner().set_gradient_hook(nullptr, nullptr);
          if (s != kBadStep) return;
          // One leaf of each rank: its first.
          Poison& mine = poisons[static_cast<size_t>(rank)];
          mine = {.leaf = step.leaves().leaf(0, rank),
                  .parameter = "wte.weight",
                  .element = 5,
                  .value = 3e38f};
          mine.put_into(step);
        });
    EXPECT_EQ(got.applied, c.steps - 1);
    EXPECT_EQ(got.reports[kBadStep].decision.outcome, Outcome::overflow);
    EXPECT_EQ(got.reports[kBadStep].overflow_text.substr(0, 32), "gradient of wte.weight[5] is inf")
        << got.reports[kBadStep].overflow_text;
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, StepOverflow,
                         testing::Values(Numbers{Precision::fp32, Dtype::fp32, 1},
                                         Numbers{Precision::bf16, Dtype::bf16, 1},
                                         Numbers{Precision::fp16, Dtype::fp32, 65536},
                                         Numbers{Precision::fp16, Dtype::fp16, 1024},
                                         Numbers{Precision::bf16_true, Dtype::bf16, 1}),
                         [](const auto& info) {
                           std::string name = std::string(name_of(info.param.precision)) +
                                              "_wire_" + name_of(info.param.wire);
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

TEST(StepLarge, IsClippedAndNotSkipped) {
  for (const int world : {1, 5}) {
    StepCase c;
    c.gpt = small_gpt();
    c.world_size = world;
    c.leaves = 7;
    c.steps = 1;
    std::vector<Poison> poisons(
        5, Poison{.leaf = 2, .parameter = "wte.weight", .element = 9, .value = 1e25f});
    const StepResult got = run_steps(c, [&](TrainStep& step, int rank, int64_t) {
      poisons[static_cast<size_t>(rank)].put_into(step);
    });
    ASSERT_EQ(got.applied, 1);
    const Decision& decision = got.reports[0].decision;
    const double mean = 2.0 * 8.0 / static_cast<double>(decision.valid);
    EXPECT_NEAR(decision.norm / (1e25 * mean), 1, 1e-6);
    // Clipped to norm 1, of which this element is all: moment1 = (1 - beta1) x 1.
    const float moment = std::bit_cast<float>(got.tensors.at("wte.weight/moment1")[9]);
    EXPECT_NEAR(moment, 0.1, 1e-6);
    EXPECT_NEAR(decision.gradient_factor * 1e25, 1, 1e-6);
  }
}

// At one step nothing counts, on every rank, or in some leaves only.
class IgnoringLeaves : public SyntheticLeaves {
 public:
  IgnoringLeaves(int64_t vocabulary, int64_t step, int64_t first_leaf)
      : SyntheticLeaves(vocabulary), step_(step), first_leaf_(first_leaf) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    SyntheticLeaves::training_leaf(step, leaf, tokens, targets);
    if (step != step_ || leaf < first_leaf_) return;
    std::fill_n(targets.as<int32_t>(), targets.numel(), kernels::kIgnoreTarget);
  }

 private:
  int64_t step_, first_leaf_;
};

TEST(StepEmpty, LeavesTheScalerAloneAndAppliesNothing) {
  for (const int zero : {0, 1, 2, 3}) {
    StepCase c;
    c.gpt = small_gpt();
    c.precision = Precision::fp16;
    c.wire = Dtype::fp16;
    c.scaler = "default";
    c.zero = zero;
    c.world_size = 5;
    c.leaves = 7;
    c.steps = 4;
    c.make_leaves = [] { return std::make_unique<IgnoringLeaves>(61, kBadStep, 0); };
    std::vector<std::vector<std::byte>> before(5);
    std::vector<ScalerState> scalers(5);
    StepResult got = run_steps(
        c,
        [&](TrainStep& step, int rank, int64_t s) {
          if (s != kBadStep) return;
          before[static_cast<size_t>(rank)] = kept_by(step);
          scalers[static_cast<size_t>(rank)] = step.scaler().state();
        },
        [&](TrainStep& step, int rank, int64_t s, const StepReport& report) {
          if (s != kBadStep) return;
          EXPECT_EQ(report.decision.outcome, Outcome::empty);
          EXPECT_EQ(report.decision.valid, 0);
          EXPECT_EQ(report.scaler.change, LossScaler::Change::kept);
          EXPECT_EQ(step.scaler().state(), scalers[static_cast<size_t>(rank)]);
          EXPECT_EQ(step.applied_steps(), kBadStep);
          EXPECT_TRUE(kept_by(step) == before[static_cast<size_t>(rank)]);
        });
    EXPECT_EQ(got.applied, 3);
    StepCase without = c;
    without.left_out = kBadStep;
    got.reports.erase(got.reports.begin() + kBadStep);
    expect_same(run_steps(without), got, c.text());
  }
}

// Only some leaves are empty: the others are averaged over what counts.
TEST(StepEmpty, LeavesAmongOthersDoNotCount) {
  StepCase c;
  c.gpt = small_gpt();
  c.leaves = 7;
  c.steps = 2;
  c.make_leaves = [] { return std::make_unique<IgnoringLeaves>(61, 0, 3); };
  const StepResult expected = run_steps(c);
  EXPECT_EQ(expected.applied, 2);
  c.world_size = 5;  // ranks 3 and 4 have nothing that counts
  expect_same(expected, run_steps(c), c.text());
  // Three leaves alone: the same mean, from 3 sums instead of 7.
  StepCase three = c;
  three.leaves = 3;
  three.steps = 1;
  EXPECT_EQ(run_steps(three).reports[0].decision.norm, expected.reports[0].decision.norm);
}

}  // namespace
}  // namespace shardrun::test
