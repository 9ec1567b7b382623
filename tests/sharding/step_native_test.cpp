// Steps with the transport's own sums: outside the promise of equal bits, inside the same numbers.
#include <gtest/gtest.h>

#include <limits>

#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

struct Numbers {
  Precision precision;
  Dtype wire;
  const char* scaler;
};
constexpr Numbers kNumbers[] = {{Precision::fp32, Dtype::fp32, "none"},
                                {Precision::bf16, Dtype::bf16, "none"},
                                {Precision::fp16, Dtype::fp16, "static:256"}};

StepCase case_of(const Numbers& numbers) {
  StepCase c;
  c.gpt = tiny_gpt();
  c.gpt.channels = 16;
  c.gpt.context = 8;
  c.precision = numbers.precision;
  c.wire = numbers.wire;
  c.scaler = numbers.scaler;
  c.leaves = 5;
  c.zero = 2;
  c.reduction = Reduction::native;
  return c;
}

// One rank adds its leaves in their order, which is the canonical one.
TEST(StepNative, OfOneRankIsExact) {
  for (const Numbers& numbers : kNumbers) {
    const StepCase native = case_of(numbers);
    StepCase exact = native;
    exact.reduction = Reduction::exact;
    expect_same(run_steps(exact), run_steps(native), native.text());
  }
}

// Sums of the same numbers in another order, in fp32: norms and losses differ by its rounding only.
TEST(StepNative, IsTheSameStepUpToRounding) {
  for (const Numbers& numbers : kNumbers) {
    StepCase exact = case_of(numbers);
    exact.reduction = Reduction::exact;
    const StepResult expected = run_steps(exact);
    for (const int world : {1, 2, 3, 4, 7}) {  // 7: more ranks than leaves
      for (const int zero : {0, 1, 2, 3}) {
        for (const auto every : {ReduceEvery::micro_step, ReduceEvery::step}) {
          StepCase c = case_of(numbers);
          c.world_size = world;
          c.zero = zero;
          c.reduce_every = every;
          c.arena = zero % 2 == 1;
          const StepResult got = run_steps(c);
          ASSERT_EQ(got.applied, expected.applied) << c.text();
          for (size_t s = 0; s < got.reports.size(); ++s) {
            const Decision &a = expected.reports[s].decision, &b = got.reports[s].decision;
            EXPECT_EQ(a.valid, b.valid);
            EXPECT_NEAR(a.norm, b.norm, (s == 0 ? 1e-6 : 2e-2) * a.norm)
                << c.text() << " step " << s;
            EXPECT_NEAR(a.loss, b.loss, (s == 0 ? 0 : 1e-2) * a.loss) << c.text() << " step " << s;
          }
        }
      }
    }
  }
}

// One infinity in one leaf is found, whoever owns the slice, and all ranks skip the step.
TEST(StepNative, SkipsWhatIsNotFinite) {
  for (const int world : {1, 2, 3}) {
    StepCase c = case_of(kNumbers[2]);
    c.world_size = world;
    c.scaler = "static:256";
    Poison poison[3];
    const StepResult got = run_steps(c, [&](TrainStep& step, int rank, int64_t s) {
      poison[rank].leaf = s == 1 ? 3 : 1000;
      poison[rank].parameter = "h.1.mlp.c_fc.weight";
      poison[rank].element = 77;
      poison[rank].value = std::numeric_limits<float>::infinity();
      poison[rank].put_into(step);
    });
    EXPECT_EQ(got.applied, c.steps - 1) << c.text();
    EXPECT_FALSE(got.reports[1].decision.apply()) << c.text();
  }
}

}  // namespace
}  // namespace shardrun::test
