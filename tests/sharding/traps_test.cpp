// Mistakes that mixed precision and sharding are known for, one test each.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "tests/sharding/odd_model.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

StepCase small_case() {
  StepCase c;
  c.gpt = tiny_gpt();
  c.gpt.layers = 1;
  c.gpt.channels = 16;
  c.gpt.context = 8;
  c.steps = 1;
  return c;
}

// Poisons several leaves; each is put in by the rank that computes it.
StepResult run_poisoned(const StepCase& c, const std::vector<Poison>& poisons,
                        const AfterStep& after = {}) {
  auto mine = poisons;
  return run_steps(
      c,
      [&](TrainStep& step, int rank, int64_t) {
        for (Poison& p : mine) {
          if (step.leaves().rank_of(p.leaf) == rank) p.put_into(step);
        }
      },
      after);
}

// The update unscales by the scale that backward used, also in the step that makes the scale grow.
TEST(Traps, GrowthStepIsNotHalfSized) {
  StepCase c = small_case();
  c.precision = Precision::fp16;
  c.scaler = "static:65536";
  const StepResult expected = run_steps(c);
  ASSERT_EQ(expected.applied, 1);
  for (const int world : {1, 3}) {
    c.world_size = world;
    c.scaler = "default";
    const StepResult got = run_steps(c, [](TrainStep& step, int, int64_t) {
      ScalerState state = step.scaler().state();
      state.good_steps = 1999;
      step.scaler().restore(state);
    });
    EXPECT_EQ(got.reports[0].scaler.change, LossScaler::Change::grew);
    EXPECT_EQ(got.reports[0].loss_scale, 65536);
    EXPECT_EQ(got.scales[0], 131072);
    expect_same(expected, got, c.text());
  }
}

// Loss x 65536 is beyond fp16; the loss and its scale stay fp32.
TEST(Traps, LossTimesScaleStaysFp32) {
  StepCase c = small_case();
  c.precision = Precision::fp16;
  c.scaler = "static:1";
  const StepResult unscaled = run_steps(c);
  for (const char* policy : {"static:65536", "static:131072"}) {
    c.scaler = policy;
    const StepResult scaled = run_steps(c);
    EXPECT_TRUE(scaled.reports[0].decision.apply()) << policy;
    EXPECT_GT(scaled.reports[0].decision.loss, 1);
    EXPECT_EQ(scaled.reports[0].decision.loss, unscaled.reports[0].decision.loss);
    EXPECT_NEAR(scaled.reports[0].decision.norm / unscaled.reports[0].decision.norm, 1, 0.02);
  }
}

// Scaling by a power of two is exact in fp32: if any tensor stayed scaled, its moments would tell.
TEST(Traps, EveryTensorIsUnscaled) {
  StepCase c = small_case();
  c.gpt.dropout = 0;
  c.steps = 3;
  const StepResult expected = run_steps(c);
  for (const int zero : {0, 1, 2, 3}) {
    c.zero = zero;
    c.world_size = 3;
    c.scaler = "static:1024";
    expect_same(expected, run_steps(c), c.text());
  }
}

// One parameter of one block for many ranks: the rank that finds infinity owns nothing of it, the
// rank that owns it computed nothing bad.
TEST(Traps, OverflowOfARankWithAnEmptyShard) {
  for (const int zero : {0, 1, 2, 3}) {
    StepCase c = small_case();
    const OddSizes sizes{.vocabulary = 2, .channels = 1, .context = 1, .hidden = {}};
    c.make_model = [sizes] { return std::make_unique<OddModel>(sizes); };
    c.gpt.vocabulary = 2;
    c.gpt.context = 1;
    c.zero = zero;
    c.world_size = 9;
    c.leaves = 9;
    int heard = 0;
    std::mutex mutex;
    run_poisoned(c, {{.leaf = 8, .parameter = "last.bias", .element = 0, .value = -kInf}},
                 [&](TrainStep& step, int rank, int64_t, const StepReport& report) {
                   std::lock_guard lock(mutex);
                   if (rank == 8) {
                     EXPECT_GE(rank * step.state().plan().units()[1].segments[0].slice,
                               step.state().plan().units()[1].segments[0].used);
                   }
                   heard += report.decision.outcome == Outcome::overflow;
                   EXPECT_EQ(report.overflow_text,
                             "gradient of last.bias[0] is inf on rank 8, micro-step 0, leaf 8");
                 });
    EXPECT_EQ(heard, 9);
  }
}

// The flag is "any", not a number that has to be 1, and the first place does not depend on who
// reports first.
TEST(Traps, SeveralOverflowsAreOneAndTheFirstIsNamed) {
  for (const int zero : {0, 1, 2, 3}) {
    for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
      StepCase c = small_case();
      c.precision = Precision::fp16;
      c.scaler = "default";
      c.zero = zero;
      c.world_size = 4;
      c.leaves = 4;
      c.reduce_every = every;
      const StepResult got =
          run_poisoned(c, {{.leaf = 3, .parameter = "ln_f.weight", .element = 1, .value = kNan},
                           {.leaf = 2, .parameter = "ln_f.weight", .element = 2, .value = kInf},
                           {.leaf = 1, .parameter = "ln_f.weight", .element = 9, .value = kNan},
                           {.leaf = 0, .parameter = "wte.weight", .element = 0, .value = kInf}});
      EXPECT_EQ(got.applied, 0);
      EXPECT_EQ(got.scales[0], 32768);
      // The head's backward comes before the embedding's, then the lower leaf counts.
      EXPECT_EQ(got.reports[0].overflow_text,
                "gradient of ln_f.weight[9] is nan on rank 1, micro-step 0, leaf 1")
          << c.text();
    }
  }
}

// All of the gradient lies in rank 0's slice; ranks that see nothing of it clip alike.
TEST(Traps, ClipsByTheNormOfAllShards) {
  for (const int world : {1, 2, 4, 7}) {
    StepCase c = small_case();
    c.world_size = world;
    c.leaves = 8;
    c.update.grad_clip = 0.25;
    std::vector<Poison> poisons;
    for (int64_t leaf = 0; leaf < world; ++leaf) {
      poisons.push_back({.leaf = leaf,
                         .parameter = "wte.weight",
                         .element = 0,
                         .value = leaf == 0 ? 64.0f : 0.0f,
                         .alone = true});
    }
    run_poisoned(c, poisons, [&](TrainStep&, int rank, int64_t, const StepReport& report) {
      const Decision& d = report.decision;
      const double mean = 16.0 / static_cast<double>(d.valid);
      EXPECT_EQ(d.norm, 64 * mean) << "rank " << rank << " of " << world;
      EXPECT_EQ(d.gradient_factor, mean * (0.25 / (d.norm + 1e-6))) << "rank " << rank;
    });
  }
}

// NaN > limit is false, and so is NaN < limit: the norm must not be what judges.
TEST(Traps, NanNormDoesNotPass) {
  for (const double clip : {0.0, 1.0}) {
    for (const int world : {1, 3}) {
      StepCase c = small_case();
      c.world_size = world;
      c.update.grad_clip = clip;
      c.steps = 0;
      const StepResult initial = run_steps(c);
      c.steps = 1;
      const StepResult got = run_poisoned(
          c, {{.leaf = 1, .parameter = "wpe.weight", .element = 3, .value = kNan}});
      EXPECT_EQ(got.reports[0].decision.outcome, Outcome::overflow);
      EXPECT_EQ(got.tensors, initial.tensors);
    }
  }
}

// A maximum over ranks may prefer a number to NaN; the decision keeps it, whoever has it.
TEST(Traps, NanOfOneRankReachesAll) {
  for (const int world : {1, 2, 5}) {
    for (int bad = 0; bad < world; ++bad) {
      run_thread_ranks(world, [&](Communicator& comm) {
        StepRecord record;
        record.valid = 4;
        record.squares.add(1e300);
        record.loss.add(comm.rank() == bad ? static_cast<double>(kNan) : 2.0);
        if (comm.rank() == bad) {
          record.overflow.micro_step = 0;
          record.overflow.leaf = bad;
          record.overflow.nan = 1;
        }
        const Decision decision = decide(record, 1, 1, 1, comm);
        EXPECT_EQ(decision.outcome, Outcome::overflow);
        EXPECT_EQ(decision.overflow.leaf, bad);
        EXPECT_EQ(decision.overflow.nan, 1);
        EXPECT_TRUE(std::isnan(decision.loss));
        EXPECT_EQ(decision.valid, 4 * world);
      });
    }
  }
}

// Sums are divided by what counts, never by ranks or by calls: not twice, not at W = 1 alone.
TEST(Traps, OneDivisorAtEveryWorldSize) {
  for (const int world : {1, 2, 4, 5}) {
    for (const int64_t leaves : {4, 7}) {
      StepCase c = small_case();
      c.world_size = world;
      c.leaves = leaves;
      c.update.grad_clip = 0;
      std::vector<Poison> poisons;
      for (int64_t leaf = 0; leaf < std::min<int64_t>(world, leaves); ++leaf) {
        poisons.push_back({.leaf = leaf, .parameter = "wte.weight", .value = 2, .alone = true});
      }
      const double sum = 2.0 * static_cast<double>(poisons.size());
      const StepResult got = run_poisoned(c, poisons);
      const Decision& d = got.reports[0].decision;
      EXPECT_EQ(d.gradient_factor, 16.0 / static_cast<double>(d.valid)) << c.text();
      EXPECT_EQ(d.norm, sum * 16.0 / static_cast<double>(d.valid)) << c.text();
      EXPECT_LT(d.valid, 16 * leaves);
      EXPECT_GT(d.valid, 8 * leaves);
    }
  }
}

// Nothing is sent at W = 1, and a leaf's gradient is rounded all the same.
TEST(Traps, ShardGroupOfOneRoundsToTheWire) {
  struct Case {
    Precision precision;
    Dtype wire;
    float value, rounded;
  };
  const Case cases[] = {{Precision::bf16, Dtype::bf16, 1 + 0x1p-10f, 1},
                        {Precision::bf16, Dtype::bf16, 1 + 0x1.8p-8f, 1 + 0x1p-7f},
                        {Precision::fp16, Dtype::fp16, 1 + 0x1p-12f, 1},
                        {Precision::bf16, Dtype::fp32, 1 + 0x1p-10f, 1 + 0x1p-10f},
                        {Precision::fp16, Dtype::fp32, 1 + 0x1p-12f, 1 + 0x1p-12f}};
  for (const Case& k : cases) {
    for (const int zero : {0, 1, 2, 3}) {
      for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
        StepCase c = small_case();
        c.precision = k.precision;
        c.wire = k.wire;
        c.zero = zero;
        c.leaves = 2;
        c.sum_block = 2;
        c.reduce_every = every;
        const StepResult got = run_poisoned(
            c, {{.leaf = 1, .parameter = "wte.weight", .value = k.value, .alone = true}});
        const Decision& d = got.reports[0].decision;
        EXPECT_EQ(d.norm, k.rounded * (16.0 / static_cast<double>(d.valid))) << c.text();
      }
    }
  }
}

// A tied table over ranks that do not divide it, padded: its last rows move like the first.
TEST(Traps, LastSliceOfTiedWeightsIsUpdated) {
  StepCase c = small_case();
  c.gpt.dropout = 0;
  c.steps = 0;
  const StepResult initial = run_steps(c);
  c.steps = 1;
  for (const int world : {1, 2, 3, 5, 7}) {
    for (const int zero : {0, 1, 2, 3}) {
      c.world_size = world;
      c.zero = zero;
      const StepResult got = run_steps(c);
      const auto& before = initial.tensors.at("wte.weight/master");
      const auto& after = got.tensors.at("wte.weight/master");
      const auto& moment = got.tensors.at("wte.weight/moment1");
      ASSERT_EQ(after.size(), size_t{61 * 16});
      for (size_t i = 0; i < after.size(); ++i) {
        ASSERT_NE(after[i], before[i]) << c.text() << " [" << i << "]";
        ASSERT_NE(moment[i], 0u) << c.text() << " [" << i << "]";
      }
    }
  }
}

// Ranks that all saw the same data would agree whatever they sum: every leaf is drawn once, by one
// rank, and each differs.
class NotingLeaves : public SyntheticLeaves {
 public:
  NotingLeaves(std::mutex& mutex, std::vector<int64_t>& drawn)
      : SyntheticLeaves(61), mutex_(mutex), drawn_(drawn) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    SyntheticLeaves::training_leaf(step, leaf, tokens, targets);
    std::lock_guard lock(mutex_);
    drawn_.push_back(step * 100 + leaf);
  }

 private:
  std::mutex& mutex_;
  std::vector<int64_t>& drawn_;
};

class SameLeaves : public SyntheticLeaves {
 public:
  using SyntheticLeaves::SyntheticLeaves;
  void training_leaf(int64_t step, int64_t, Tensor tokens, Tensor targets) override {
    SyntheticLeaves::training_leaf(step, 0, tokens, targets);
  }
};

// Nobody decides before the last rank has spoken: the one that overflowed comes late, each in turn.
TEST(Traps, TheFlagOfALateRankIsWaitedFor) {
  for (int world : {2, 3, 5}) {
    for (int late = 0; late < world; ++late) {
      std::vector<Outcome> outcomes(world, Outcome::apply);
      std::vector<int64_t> leaves(world, -1);
      run_thread_ranks(
          world,
          [&](Communicator& comm) {
            StepRecord record;
            record.valid = 1;
            record.squares.add(1.0);
            if (comm.rank() == late) {
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
              record.overflow = {.micro_step = 0, .leaf = late};
            }
            const Decision decision = decide(record, 1024, 1, 1, comm);
            outcomes[comm.rank()] = decision.outcome;
            leaves[comm.rank()] = decision.overflow.leaf;
          },
          60);
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ(outcomes[rank], Outcome::overflow) << "W=" << world << " late " << late;
        EXPECT_EQ(leaves[rank], late) << "W=" << world << " rank " << rank;
      }
    }
  }
}

TEST(Traps, RanksSeeDifferentData) {
  for (const int world : {1, 3, 5}) {
    std::mutex mutex;
    std::vector<int64_t> drawn;
    StepCase c = small_case();
    c.gpt.dropout = 0;
    c.world_size = world;
    c.leaves = 7;
    c.steps = 2;
    c.make_leaves = [&] { return std::make_unique<NotingLeaves>(mutex, drawn); };
    const StepResult different = run_steps(c);
    std::sort(drawn.begin(), drawn.end());
    const std::vector<int64_t> each{0, 1, 2, 3, 4, 5, 6, 100, 101, 102, 103, 104, 105, 106};
    EXPECT_EQ(drawn, each);
    c.make_leaves = [] { return std::make_unique<SameLeaves>(61); };
    EXPECT_NE(run_steps(c).tensors, different.tensors);
  }
}

}  // namespace
}  // namespace shardrun::test
