// The promise: the same bits at every world size, stage, thread count, with and without recomputation,
// and reduced every micro-step or once.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

void expect_same(const StepResult& expected, const StepResult& got, const std::string& what) {
  ASSERT_EQ(expected.tensors.size(), got.tensors.size()) << what;
  for (const auto& [name, bits] : expected.tensors) {
    const auto it = got.tensors.find(name);
    ASSERT_NE(it, got.tensors.end()) << what << ": " << name;
    ASSERT_EQ(bits.size(), it->second.size()) << what << ": " << name;
    for (size_t i = 0; i < bits.size(); ++i) {
      ASSERT_EQ(bits[i], it->second[i]) << what << ": " << name << "[" << i << "]";
    }
  }
  ASSERT_EQ(expected.reports.size(), got.reports.size());
  for (size_t s = 0; s < expected.reports.size(); ++s) {
    const Decision &a = expected.reports[s].decision, &b = got.reports[s].decision;
    EXPECT_EQ(std::bit_cast<uint64_t>(a.loss), std::bit_cast<uint64_t>(b.loss)) << what << s;
    EXPECT_EQ(std::bit_cast<uint64_t>(a.norm), std::bit_cast<uint64_t>(b.norm)) << what << s;
  }
}

struct Numbers {
  Precision precision;
  Dtype wire;
  const char* scaler;
};

class StepBits : public testing::TestWithParam<Numbers> {};

// The whole product over thread ranks, for a number of leaves that W divides and one that it does not.
TEST_P(StepBits, FullProduct) {
  for (int64_t leaves : {4, 7}) {
    StepCase base;
    base.gpt = tiny_gpt();
    base.precision = GetParam().precision;
    base.wire = GetParam().wire;
    base.scaler = GetParam().scaler;
    base.leaves = leaves;
    base.steps = 3;
    for (int64_t sum_block : {1, 2, 4}) {
      base.sum_block = sum_block;
      base.world_size = 1;
      base.zero = 0;
      base.reduce_every = ReduceEvery::micro_step;
      const StepResult expected = run_steps(base);
      ASSERT_EQ(expected.applied, base.steps);
      for (int world : {1, 2, 3, 4, 5}) {
        for (int zero : {0, 1, 2, 3}) {
          for (int recompute : {0, 1}) {
            for (auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
              StepCase c = base;
              c.world_size = world;
              c.zero = zero;
              c.recompute = recompute;
              c.threads = 1 + (world + zero) % 2;
              c.reduce_every = every;
              c.arena = recompute == 1;
              const int64_t micro_steps = (leaves + world - 1) / world;
              if (every == ReduceEvery::step && micro_steps != sum_block) continue;
              expect_same(expected, run_steps(c), c.text());
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
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

TEST(Step, LossFalls) {
  StepCase c;
  c.gpt = tiny_gpt();
  c.gpt.dropout = 0;
  c.world_size = 2;
  c.steps = 30;
  c.one_batch = true;  // fresh tokens are noise, and nothing can be learnt from them
  const StepResult result = run_steps(c);
  const double first = result.reports.front().decision.loss;
  EXPECT_NEAR(first, std::log(61), 0.1);
  EXPECT_LT(result.reports.back().decision.loss, 0.7 * first);
}

}  // namespace
}  // namespace shardrun::test
