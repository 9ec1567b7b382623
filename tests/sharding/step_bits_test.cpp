// The promise: the same bits at every world size, stage, thread count, with and without
// recomputation, and reduced every micro-step or once.
#include <gtest/gtest.h>

#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

struct Numbers {
  Precision precision;
  Dtype wire;
  const char* scaler;
};

class StepBits : public testing::TestWithParam<Numbers> {
 protected:
  static constexpr int kSteps = 20;

  StepCase case_of(int64_t leaves, int64_t sum_block) const {
    StepCase c;
    // Smaller than tiny_gpt(): the product is long. The head still has fewer blocks than ranks.
    c.gpt = tiny_gpt();
    c.gpt.channels = 16;
    c.gpt.context = 8;
    c.precision = GetParam().precision;
    c.wire = GetParam().wire;
    c.scaler = GetParam().scaler;
    c.leaves = leaves;
    c.sum_block = sum_block;
    c.steps = kSteps;
    c.zero = 0;
    return c;
  }

  // 4 leaves: W = 1, 2 and 4 divide them. 7: only 1 does, and other blocks end inside the step.
  static std::vector<int64_t> sum_blocks(int64_t leaves) {
    return leaves == 4 ? std::vector<int64_t>{1, 2, 4} : std::vector<int64_t>{1, 2, 3, 4, 7};
  }
};

// Everything over thread ranks. Bits belong to a sum block; reducing once a step needs one that
// spans what a rank computes.
TEST_P(StepBits, FullProduct) {
  for (const int64_t leaves : {4, 7}) {
    for (const int64_t sum_block : sum_blocks(leaves)) {
      const StepCase base = case_of(leaves, sum_block);
      const StepResult expected = run_steps(base);
      ASSERT_EQ(expected.applied, kSteps);
      for (const int world : {1, 2, 3, 4, 5}) {
        for (const int zero : {0, 1, 2, 3}) {
          for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
            const int64_t micro_steps = (leaves + world - 1) / world;
            if (every == ReduceEvery::step && micro_steps != sum_block) continue;
            for (const int recompute : {0, 1}) {
              for (const int threads : {1, 2}) {
                StepCase c = base;
                c.world_size = world;
                c.zero = zero;
                c.recompute = recompute;
                c.threads = threads;
                c.reduce_every = every;
                c.arena = (recompute + threads + zero) % 2 == 0;
                c.prefetch = (world + recompute + threads) % 3;
                expect_same(expected, run_steps(c), c.text());
                if (HasFatalFailure()) return;
              }
            }
          }
        }
      }
    }
  }
}

// The product compares something: what may move bits does.
TEST_P(StepBits, DependOnDataLeavesAndSumBlock) {
  const StepCase base = case_of(7, 1);
  const StepResult expected = run_steps(base);
  StepCase blocks = base;
  blocks.sum_block = 3;
  EXPECT_NE(run_steps(blocks).tensors, expected.tensors);
  StepCase fewer = base;
  fewer.leaves = 6;
  EXPECT_NE(run_steps(fewer).tensors, expected.tensors);
  if (GetParam().wire != Dtype::fp32) {
    StepCase wide = base;
    wide.wire = Dtype::fp32;
    EXPECT_NE(run_steps(wide).tensors, expected.tensors);
  }
}

TEST_P(StepBits, LossFalls) {
  StepCase c = case_of(4, 1);
  c.gpt.dropout = 0;
  c.world_size = 2;
  c.zero = 3;
  const StepResult result = run_steps(c);
  // From log(61) = 4.1; all that there is to learn is which token follows which.
  EXPECT_LT(result.reports.back().decision.loss, result.reports.front().decision.loss - 1);
}

INSTANTIATE_TEST_SUITE_P(
    Precisions, StepBits,
    testing::Values(Numbers{Precision::fp32, Dtype::fp32, "none"},
                    Numbers{Precision::bf16, Dtype::fp32, "none"},
                    Numbers{Precision::bf16, Dtype::bf16, "none"},
                    Numbers{Precision::fp16, Dtype::fp32, "static:1024"},
                    Numbers{Precision::fp16, Dtype::fp16, "static:1024"},
                    Numbers{Precision::bf16_true, Dtype::bf16, "none"}),
    [](const auto& info) {
      std::string name =
          std::string(name_of(info.param.precision)) + "_wire_" + name_of(info.param.wire);
      for (char& c : name) c = c == '-' ? '_' : c;
      return name;
    });

}  // namespace
}  // namespace shardrun::test
