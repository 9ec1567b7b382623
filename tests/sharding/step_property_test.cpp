// Random small models, numbers of leaves and numbers: the same bits over 1, 2, 7, 16 and 64 ranks.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "tests/sharding/odd_model.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

StepCase case_of(const OddSizes& sizes) {
  StepCase c;
  c.make_model = [sizes] { return std::make_unique<OddModel>(sizes); };
  c.gpt.context = sizes.context;
  c.gpt.vocabulary = sizes.vocabulary;
  c.steps = 2;
  return c;
}

// expect_same() for rapidcheck, which wants to see a failure to shrink it.
std::string first_difference(const StepResult& a, const StepResult& b) {
  for (const auto& [name, bits] : a.tensors) {
    if (b.tensors.at(name) != bits) return name;
  }
  for (size_t s = 0; s < a.reports.size(); ++s) {
    if (a.reports[s].decision.outcome != b.reports[s].decision.outcome) return "outcome";
    if (a.reports[s].decision.norm != b.reports[s].decision.norm) return "norm";
    if (a.reports[s].decision.loss != b.reports[s].decision.loss) return "loss";
  }
  return a.tensors.size() == b.tensors.size() ? "" : "tensors";
}

rc::Gen<int64_t> between(int64_t first, int64_t last) {
  return rc::gen::inRange<int64_t>(first, last + 1);
}

TEST(StepProperty, SameBitsOverAnyWorld) {
  EXPECT_TRUE(rc::check("same bits", [] {
    OddSizes sizes;
    sizes.vocabulary = *between(2, 41);
    sizes.padded = *between(0, 5);
    sizes.channels = *between(1, 29);
    sizes.context = *between(1, 5);
    sizes.hidden = *rc::gen::resize(3, rc::gen::container<std::vector<int64_t>>(between(0, 47)));
    sizes.unused = *rc::gen::element<int64_t>(0, 1, 257, 1009);
    StepCase c = case_of(sizes);
    struct Numbers {
      Precision precision;
      Dtype wire;
    };
    const Numbers numbers[] = {{Precision::fp32, Dtype::fp32},
                               {Precision::bf16, Dtype::bf16},
                               {Precision::fp16, Dtype::fp16},
                               {Precision::bf16_true, Dtype::bf16}};
    const Numbers chosen = numbers[*rc::gen::inRange(0, 4)];
    c.precision = chosen.precision;
    c.wire = chosen.wire;
    c.scaler = c.precision == Precision::fp16 ? "static:128" : "none";
    c.leaves = *between(1, 19);
    c.sum_block = *between(1, 4);
    c.zero = 0;
    const StepResult expected = run_steps(c);
    for (const int world : {1, 2, 7, 16, 64}) {
      c.world_size = world;
      c.zero = *rc::gen::inRange(0, 4);
      c.recompute = *rc::gen::inRange(0, 3);
      c.arena = *rc::gen::arbitrary<bool>();
      const std::string difference = first_difference(expected, run_steps(c));
      if (!difference.empty()) RC_FAIL(fmt::format("{}: {} differs", c.text(), difference));
    }
  }));
}

// The smallest of everything, over every stage and a world larger than the number of parameters.
TEST(StepProperty, OneOfEverything) {
  OddSizes sizes{.vocabulary = 2, .padded = 0, .channels = 1, .context = 1, .hidden = {0, 1},
                 .unused = 1};
  StepCase c = case_of(sizes);
  c.leaves = 3;
  c.zero = 0;
  const StepResult expected = run_steps(c);
  EXPECT_EQ(expected.applied, c.steps);
  for (const int world : {1, 2, 3, 64}) {
    for (const int zero : {0, 1, 2, 3}) {
      c.world_size = world;
      c.zero = zero;
      expect_same(expected, run_steps(c), c.text());
    }
  }
}

}  // namespace
}  // namespace shardrun::test
