// The runner's own promises: who may read which parameter, gradients of parameters that a leaf did
// not use, sums over several units that are rounded once.
#include "runtime/plain_runner.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/ops/ops.h"
#include "tests/kernels/op_model.h"

namespace shardrun {
namespace {

using Inputs = std::span<const Value>;
using Units = LambdaModel::Units;

std::unique_ptr<LambdaUnit> unit(const char* path, int parameters, LambdaUnit::Forward forward) {
  std::vector<ParameterSpec> specs(parameters, {.name = "p", .shape = {1}});
  return std::make_unique<LambdaUnit>(path, std::move(specs), std::move(forward));
}

float gradient_of(PlainRunner& runner, const Model& model, int unit, int parameter) {
  return *runner.gradient_of({model.units()[unit], parameter}).as<float>();
}

// A test's loss adds `seed` times its factor to the gradient of its input.
void times_backward(BackwardCall& call) {
  Value dx = call.make_like_input(0);
  set(dx.tensor().data(), dx.dtype(), 0, call.seed() * call.attributes<float>());
  call.give(0, std::move(dx));
}
constexpr Op kTimes{"times", times_backward, true};

Values times(UnitCall& call, const Value& x, float factor) {
  const Value sum = call.make(Dtype::fp32, Shape{1}, "times");
  const Value valid = call.make(Dtype::int64, Shape{1}, "valid");
  call.record(kTimes, {x}, {sum, valid}, {}, {}, factor);
  return {sum, valid};
}

// 256 + 1 + 1: bf16 has steps of 2 there, so rounding after each would stay at 256.
TEST(PlainRunner, GradientsOfThreeUnitsAreRoundedOnce) {
  for (int recompute : {0, 1, 2}) {
    Units units;
    units.push_back(unit("x", 1, [](UnitCall& call, Inputs) {
      return source(call, call.parameter(0));
    }));
    for (float factor : {1.0f, 1.0f, 256.0f}) {
      units.push_back(unit("loss", 0, [=](UnitCall& call, Inputs inputs) {
        return times(call, inputs[0], factor);
      }));
    }
    const LambdaModel model(std::move(units), [](UnitRunner& run, const Batch&, const Units& u) {
      const Value x = run(*u[0], {});
      Values loss;
      for (int i : {1, 2, 3}) loss = run(*u[i], {x});
      return Loss{loss[0], loss[1]};
    });
    PlainRig rig(model, {.activation_dtype = Dtype::bf16, .recompute_every = recompute});
    rig.runner().begin_leaf({}, true);
    rig.runner().backward(model.forward(rig.runner(), {}), 1);
    EXPECT_EQ(gradient_of(rig.runner(), model, 0, 0), 258) << "recomputed every " << recompute;
  }
}

TEST(PlainRunner, AForeignParameterNeedsItsOwner) {
  for (bool named : {true, false}) {
    Units units;
    const LambdaUnit* owner = nullptr;
    units.push_back(unit("owner", 1, [](UnitCall& call, Inputs) {
      return source(call, call.parameter(0));
    }));
    units.push_back(unit("guest", 0, [&](UnitCall& call, Inputs) {
      return dot(call, source(call, {owner, 0}));
    }));
    const LambdaModel model(std::move(units), [&](UnitRunner& run, const Batch&, const Units& u) {
      owner = u[0].get();
      run(*u[0], {});
      const Values loss = named ? run(*u[1], {}, {owner}) : run(*u[1], {});
      return Loss{loss[0], loss[1]};
    });
    PlainRig rig(model, {});
    rig.runner().begin_leaf({}, true);
    if (named) {
      rig.runner().backward(model.forward(rig.runner(), {}), 1);
      EXPECT_EQ(gradient_of(rig.runner(), model, 0, 0), static_cast<float>(dot_weight(0)));
    } else {
      EXPECT_THROW(model.forward(rig.runner(), {}), InternalError);
    }
  }
}

// A leaf overwrites what the one before left, also where it uses nothing.
TEST(PlainRunner, AnUnusedParameterHasGradientZero) {
  Units units;
  int used = 0;
  units.push_back(unit("two", 2, [&](UnitCall& call, Inputs) {
    return dot(call, source(call, call.parameter(used)));
  }));
  const LambdaModel model(std::move(units), [](UnitRunner& run, const Batch&, const Units& u) {
    const Values loss = run(*u[0], {});
    return Loss{loss[0], loss[1]};
  });
  PlainRig rig(model, {});
  for (int leaf = 0; leaf < 4; ++leaf) {
    used = leaf % 2;
    rig.runner().begin_leaf({.step = 0, .leaf = leaf}, true);
    rig.runner().backward(model.forward(rig.runner(), {}), 2);
    EXPECT_EQ(gradient_of(rig.runner(), model, 0, used), 2 * static_cast<float>(dot_weight(0)));
    EXPECT_EQ(gradient_of(rig.runner(), model, 0, 1 - used), 0);
  }
}

TEST(PlainRunner, InitialValuesAreRoundedAndPadded) {
  Units units;
  units.push_back(std::make_unique<LambdaUnit>(
      "u", std::vector<ParameterSpec>{{.name = "p", .shape = {3, 2}, .padded_rows = 4}},
      [](UnitCall&, Inputs) { return Values(); }));
  const LambdaModel model(std::move(units), {});
  PlainRig rig(model, {.seed = 9, .activation_dtype = Dtype::bf16});
  const Tensor value = rig.runner().value_of({model.units()[0], 0});
  for (int64_t e = 0; e < 8; ++e) set(value.data(), value.dtype(), e, 5);
  rig.runner().initialize([](Tensor out, const ParameterSpec& spec, int64_t begin, uint64_t seed,
                             Stream&) {
    EXPECT_EQ(out.numel(), 6);
    EXPECT_EQ(spec.name, "p");
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(seed, 9u);
    for (int64_t e = 0; e < out.numel(); ++e) out.as<float>()[e] = 256 + static_cast<float>(e);
  });
  const double want[] = {256, 256, 258, 260, 260, 260, 0, 0};  // nearest even
  for (int64_t e = 0; e < 8; ++e) EXPECT_EQ(get(value.data(), value.dtype(), e), want[e]) << e;
}

}  // namespace
}  // namespace shardrun
