// The training step of virtual GPUs over NCCL: the bits of the staged transport, at every number of ranks,
// stage and schedule; with NCCL's own sums, the same step up to their rounding.
#include <gtest/gtest.h>

#include "runtime/device.h"
#include "tests/virtual_cuda/nccl.h"
#include "tests/virtual_cuda/runtime.h"
#include "tests/virtual_cuda/step_cases.h"

namespace shardrun::test {
namespace {

struct Numbers {
  Precision precision;
  Dtype wire;
  const char* scaler;
  double rounding;  // of a native sum, relative to the norm
};
constexpr Numbers kNumbers[] = {{Precision::fp32, Dtype::fp32, "none", 1e-6},
                                {Precision::bf16, Dtype::bf16, "none", 0x1p-7},
                                {Precision::fp16, Dtype::fp16, "static:256", 0x1p-9}};

StepCase case_of(const Numbers& numbers) {
  return odd_case(numbers.precision, numbers.wire, numbers.scaler);
}

StepCase gpt_case(const Numbers& numbers) {
  return test::gpt_case(numbers.precision, numbers.wire, numbers.scaler);
}

StepResult run(const StepCase& c, uint64_t seed) {
  virtual_cuda::Settings settings;
  settings.seed = seed;
  settings.devices = 4;
  virtual_cuda::reset(settings);
  return run_steps(c);
}

// All world sizes and stages against one rank at stage 0, each under `seeds` schedules of its own.
void expect_one_set_of_bits(const StepCase& base, int seeds, uint64_t& seed) {
  StepCase alone = base;
  alone.zero = 0;
  const StepResult expected = run(alone, 0);
  ASSERT_EQ(expected.applied, base.steps) << base.text();
  for (const int world : {1, 2, 3, 4}) {
    for (const int zero : {0, 1, 2, 3}) {
      for (int turn = 0; turn < seeds; ++turn) {
        StepCase c = base;
        c.nccl = true;
        c.world_size = world;
        c.zero = zero;
        c.arena = turn % 2 == 0;
        c.prefetch = static_cast<int>(++seed % 3);
        expect_same(expected, run(c, seed), fmt::format("{} seed {}", c.text(), seed));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
  EXPECT_EQ(virtual_cuda::living_nccl().communicators, 0);
}

TEST(NcclStep, HasTheBitsOfOneRank) {
  uint64_t seed = 100;
  for (const Numbers& numbers : kNumbers) {
    expect_one_set_of_bits(case_of(numbers), 4, seed);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(NcclStep, HasTheBitsOfOneRankInAGpt) {
  uint64_t seed = 1000;
  for (const Numbers& numbers : {kNumbers[1], kNumbers[2]}) {
    expect_one_set_of_bits(gpt_case(numbers), 1, seed);
    if (testing::Test::HasFailure()) return;
  }
}

// Nightly: fifty seeds for each precision, world size and stage.
TEST(NcclStep, DISABLED_FullProduct) {
  uint64_t seed = 100000;
  for (const Numbers& numbers : kNumbers) {
    expect_one_set_of_bits(gpt_case(numbers), 50, seed);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(NcclStep, OfNativeSumsIsTheSameUpToRounding) {
  uint64_t seed = 500;
  for (const Numbers& numbers : kNumbers) {
    const StepResult expected = run(case_of(numbers), 0);
    for (const bool nccl : {true, false}) {
      for (const int world : {1, 2, 3, 4}) {
        StepCase c = case_of(numbers);
        c.nccl = nccl;
        c.reduction = Reduction::native;
        c.world_size = world;
        c.zero = world - 1;
        c.arena = true;
        c.prefetch = world % 3;
        const StepResult got = run(c, ++seed);
        ASSERT_EQ(got.applied, expected.applied) << c.text();
        const Decision &a = expected.reports[0].decision, &b = got.reports[0].decision;
        EXPECT_EQ(a.loss, b.loss) << c.text();
        EXPECT_NEAR(a.norm, b.norm, numbers.rounding * a.norm) << c.text();
      }
    }
  }
}

}  // namespace
}  // namespace shardrun::test
