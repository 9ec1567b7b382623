// Every differentiable op against central finite differences of its formula in double: alone, with
// one Value or one parameter used more than once, in one unit and across units. Each net also runs
// with recomputation, which must keep the bits, and in bf16 and fp16.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "kernels/ops/ops.h"
#include "tests/kernels/double_ops.h"
#include "tests/kernels/op_model.h"

namespace shardrun {
namespace {

using in_double::Numbers;
using Inputs = std::span<const Value>;
using Parameters = std::vector<Numbers>;

// Key of the draw with this ordinal in unit 0, at its first or second use.
struct Keys {
  RandomKey drawn[2][4];
  RandomKey operator()(int ordinal, int use = 0) const { return drawn[use][ordinal]; }
};

constexpr float kSeed = 0.75f;  // exact in 16 bits
const std::vector<int32_t> kTokens = {3, 1, 4, 1, 5, 2};   // one twice, some never
const std::vector<int32_t> kTargets = {0, 6, -1, 3, 3, -1};
constexpr int64_t kBatch = 2, kTime = 3;

struct UnitSpec {
  std::vector<ParameterSpec> parameters;
  LambdaUnit::Forward forward;
};

// `reference` sees all parameters (padding included), in order of units.
struct Net {
  std::vector<UnitSpec> units;
  std::function<double(const Parameters&, const Keys&)> reference;
  LambdaModel::Forward forward = [](UnitRunner& run, const Batch& batch, const auto& units) {
    const Values loss = run(*units[0], {batch.tokens, batch.targets});
    return Loss{loss[0], loss[1]};
  };
};

ParameterSpec shaped(const Shape& shape, int64_t padded_rows = 0) {
  return {.name = "p", .shape = shape, .padded_rows = padded_rows};
}

double dot(const Numbers& y) {
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += dot_weight(static_cast<int64_t>(i)) * y[i];
  return sum;
}

// One run of a net: the loss, and per parameter the gradient.
struct NetRun {
  float loss = 0;
  std::vector<std::vector<float>> gradients;
  Parameters parameters;
  Keys keys;
};

std::unique_ptr<LambdaModel> build(const Net& net) {
  LambdaModel::Units units;
  for (const UnitSpec& spec : net.units) {
    units.push_back(std::make_unique<LambdaUnit>(fmt::format("unit.{}", units.size()),
                                                 spec.parameters, spec.forward));
  }
  return std::make_unique<LambdaModel>(std::move(units), net.forward);
}

NetRun run(const Net& net, Dtype dtype, int recompute_every) {
  const auto model = build(net);
  PlainRig rig(*model, {.activation_dtype = dtype, .recompute_every = recompute_every});
  PlainRunner& runner = rig.runner();
  std::vector<ParameterRef> refs;
  for (const Unit* unit : model->units()) {
    for (size_t i = 0; i < unit->parameters().size(); ++i) {
      refs.push_back({unit, static_cast<int>(i)});
    }
  }
  NetRun out;
  std::mt19937 engine(5);
  std::normal_distribution<float> draw;
  for (ParameterRef ref : refs) {
    const Tensor value = runner.value_of(ref);
    Numbers& numbers = out.parameters.emplace_back();
    for (int64_t e = 0; e < value.numel(); ++e) {
      Bf16 exact;  // the same values in every dtype
      math::narrow(draw(engine), exact);
      set(value.data(), value.dtype(), e, math::widen(exact));
      numbers.push_back(math::widen(exact));
    }
  }
  // Twice: what a leaf leaves behind must not show in the next.
  for (int leaf : {4, 5}) {
    runner.begin_leaf({.step = 3, .leaf = leaf}, true);
    const auto wrap = [&](const std::vector<int32_t>& numbers) {
      return runner.pool().wrap({numbers.data(), Dtype::int32, {kBatch, kTime}});
    };
    const Loss loss = model->forward(runner, {wrap(kTokens), wrap(kTargets)});
    runner.backward(loss, kSeed);
    out.loss = *loss.sum.tensor().as<float>();
  }
  EXPECT_EQ(runner.pool().live(), 0) << "Values outlive the leaf";
  for (ParameterRef ref : refs) {
    const Tensor gradient = runner.gradient_of(ref);
    out.gradients.emplace_back(gradient.as<float>(), gradient.as<float>() + gradient.numel());
  }
  for (int use : {0, 1}) {
    for (uint64_t i = 0; i < 4; ++i) {
      out.keys.drawn[use][i] = runner.random_key(*model->units()[0], use, i);
    }
  }
  return out;
}

// Relative to the largest element of the parameter's gradient; bf16 and fp16 in their roundoffs.
// Measured: 4.3e-7 and 1.7 over all instruction sets, fp16 2.0 at the best one. The differences
// themselves are good to 1e-10.
constexpr double kFp32Bound = 1.2e-6;
constexpr double kNarrowRoundoffs = 4;

void check(const Net& net) {
  const NetRun fp32 = run(net, Dtype::fp32, 0);
  const std::pair<Dtype, NetRun> narrow[] = {{Dtype::bf16, run(net, Dtype::bf16, 0)},
                                             {Dtype::fp16, run(net, Dtype::fp16, 0)}};
  const Keys& keys = fp32.keys;
  const double loss = net.reference(fp32.parameters, keys);
  EXPECT_NEAR(fp32.loss, loss, 2e-6 * (1 + std::abs(loss)));

  double worst = 0, worst_narrow = 0;
  for (size_t p = 0; p < fp32.parameters.size(); ++p) {
    Parameters moved = fp32.parameters;
    Numbers slopes;
    double largest = 0;
    for (size_t e = 0; e < moved[p].size(); ++e) {
      const double middle = moved[p][e];
      const auto difference = [&](double step) {
        moved[p][e] = middle + step;
        const double up = net.reference(moved, keys);
        moved[p][e] = middle - step;
        return up - net.reference(moved, keys);
      };
      constexpr double kStep = 1e-3;  // of fourth order
      slopes.push_back(kSeed * (8 * difference(kStep) - difference(2 * kStep)) / (12 * kStep));
      moved[p][e] = middle;
      largest = std::max(largest, std::abs(slopes.back()));
    }
    ASSERT_GT(largest, 0) << "parameter " << p << " does nothing";
    for (size_t e = 0; e < slopes.size(); ++e) {
      const double error = std::abs(fp32.gradients[p][e] - slopes[e]) / largest;
      worst = std::max(worst, error);
      ASSERT_LE(error, kFp32Bound) << "parameter " << p << " element " << e << " got "
                                   << fp32.gradients[p][e] << " want " << slopes[e];
      for (const auto& [dtype, got] : narrow) {
        const double roundoffs =
            std::abs(got.gradients[p][e] - slopes[e]) / largest / unit_roundoff(dtype);
        worst_narrow = std::max(worst_narrow, roundoffs);
        ASSERT_LE(roundoffs, kNarrowRoundoffs)
            << name_of(dtype) << " parameter " << p << " element " << e << " got "
            << got.gradients[p][e] << " want " << slopes[e];
      }
    }
  }
  std::printf("largest error %.2g, in 16 bits %.2g roundoffs\n", worst, worst_narrow);

  for (int every : {1, 2}) {
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
      const NetRun& first = dtype == Dtype::fp32 ? fp32 : narrow[0].second;
      const NetRun again = run(net, dtype, every);
      EXPECT_EQ(again.loss, first.loss) << "recomputed every " << every;
      for (size_t p = 0; p < first.gradients.size(); ++p) {
        EXPECT_EQ(std::memcmp(again.gradients[p].data(), first.gradients[p].data(),
                              first.gradients[p].size() * sizeof(float)),
                  0)
            << "parameter " << p << " recomputed every " << every << " in " << name_of(dtype);
      }
    }
  }
}

// ---- one op

TEST(OpsGradient, Linear) {
  for (bool bias : {false, true}) {
    Net net;
    std::vector<ParameterSpec> parameters = {shaped({2, 3, 5}), shaped({7, 5})};
    if (bias) parameters.push_back(shaped({7}));
    net.units = {{parameters, [=](UnitCall& call, Inputs) {
                    const ParameterRef b = bias ? call.parameter(2) : ParameterRef();
                    const Value x = source(call, call.parameter(0));
                    return dot(call, ops::linear(call, x, call.parameter(1), b));
                  }}};
    net.reference = [=](const Parameters& p, const Keys&) {
      return dot(in_double::linear(p[0], p[1], bias ? &p[2] : nullptr, 5));
    };
    check(net);
  }
}

TEST(OpsGradient, LayerNorm) {
  for (bool bias : {false, true}) {
    Net net;
    std::vector<ParameterSpec> parameters = {shaped({2, 3, 37}), shaped({37})};
    if (bias) parameters.push_back(shaped({37}));
    net.units = {{parameters, [=](UnitCall& call, Inputs) {
                    const ParameterRef b = bias ? call.parameter(2) : ParameterRef();
                    const Value x = source(call, call.parameter(0));
                    return dot(call, ops::layer_norm(call, x, call.parameter(1), b));
                  }}};
    net.reference = [=](const Parameters& p, const Keys&) {
      return dot(in_double::layer_norm(p[0], p[1], bias ? &p[2] : nullptr));
    };
    check(net);
  }
}

TEST(OpsGradient, Gelu) {
  Net net;
  net.units = {{{shaped({5, 33})}, [](UnitCall& call, Inputs) {
                  return dot(call, ops::gelu(call, source(call, call.parameter(0))));
                }}};
  net.reference = [](const Parameters& p, const Keys&) { return dot(in_double::gelu(p[0])); };
  check(net);
}

TEST(OpsGradient, Add) {
  Net net;
  net.units = {{{shaped({5, 33}), shaped({5, 33})}, [](UnitCall& call, Inputs) {
                  const Value a = source(call, call.parameter(0));
                  return dot(call, ops::add(call, a, source(call, call.parameter(1))));
                }}};
  net.reference = [](const Parameters& p, const Keys&) { return dot(in_double::add(p[0], p[1])); };
  check(net);
}

// Two in a row: each draws its own numbers.
TEST(OpsGradient, Dropout) {
  Net net;
  net.units = {{{shaped({5, 33})}, [](UnitCall& call, Inputs) {
                  const Value x = ops::dropout(call, source(call, call.parameter(0)), 0.25f);
                  return dot(call, ops::dropout(call, ops::gelu(call, x), 0.5f));
                }}};
  net.reference = [](const Parameters& p, const Keys& keys) {
    const Numbers x = in_double::gelu(in_double::dropout(p[0], 0.25f, keys(0)));
    return dot(in_double::dropout(x, 0.5f, keys(1)));
  };
  check(net);
}

// The same unit twice: its second call draws other numbers than its first.
TEST(OpsGradient, DropoutInASecondCall) {
  Net net;
  net.units = {{{shaped({5, 33})},
                [](UnitCall& call, Inputs) {
                  const Value x = source(call, call.parameter(0));
                  return ops::dropout(call, ops::gelu(call, x), 0.5f);
                }},
               {{}, [](UnitCall& call, Inputs inputs) {
                  return dot(call, ops::add(call, inputs[0], inputs[1]));
                }}};
  net.forward = [](UnitRunner& run, const Batch&, const auto& units) {
    const Value first = run(*units[0], {}), second = run(*units[0], {});
    const Values loss = run(*units[1], {first, second});
    return Loss{loss[0], loss[1]};
  };
  net.reference = [](const Parameters& p, const Keys& keys) {
    const Numbers x = in_double::gelu(p[0]);
    return dot(in_double::add(in_double::dropout(x, 0.5f, keys(0, 0)),
                              in_double::dropout(x, 0.5f, keys(0, 1))));
  };
  check(net);
  const Keys keys = run(net, Dtype::fp32, 0).keys;
  EXPECT_NE(keys(0, 0).key, keys(0, 1).key);
}

TEST(OpsGradient, DropoutOfNothingIsTheValueItself) {
  Net net;
  bool same = false;
  net.units = {{{shaped({5})}, [&](UnitCall& call, Inputs) {
                  const Value x = source(call, call.parameter(0));
                  same = ops::dropout(call, x, 0).same_as(x);
                  return dot(call, x);
                }}};
  run(net, Dtype::fp32, 0);
  EXPECT_TRUE(same);
}

TEST(OpsGradient, Attention) {
  for (bool causal : {true, false}) {
    for (float p : {0.0f, 0.25f}) {
      Net net;
      net.units = {{{shaped({2, 5, 24})}, [=](UnitCall& call, Inputs) {
                      const Value qkv = source(call, call.parameter(0));
                      return dot(call, ops::attention(call, qkv, 2, causal, p));
                    }}};
      net.reference = [=](const Parameters& parameters, const Keys& keys) {
        return dot(in_double::attention(parameters[0], 2, 5, 2, 4, causal, p, keys(0)));
      };
      check(net);
    }
  }
}

TEST(OpsGradient, Embedding) {
  for (bool positions : {false, true}) {
    Net net;
    std::vector<ParameterSpec> parameters = {shaped({7, 5}, 16)};
    if (positions) parameters.push_back(shaped({kTime + 1, 5}));
    net.units = {{parameters, [=](UnitCall& call, Inputs inputs) {
                    const ParameterRef second = positions ? call.parameter(1) : ParameterRef();
                    return dot(call, ops::embedding(call, inputs[0], call.parameter(0), second));
                  }}};
    net.reference = [=](const Parameters& p, const Keys&) {
      return dot(in_double::embedding(kTokens, kTime, p[0], positions ? &p[1] : nullptr, 5));
    };
    check(net);
  }
}

TEST(OpsGradient, CrossEntropy) {
  Net net;
  net.units = {{{shaped({kBatch, kTime, 16})}, [](UnitCall& call, Inputs inputs) {
                  const Value logits = source(call, call.parameter(0));
                  return ops::cross_entropy(call, logits, inputs[1], 7);
                }}};
  net.reference = [](const Parameters& p, const Keys&) {
    return in_double::cross_entropy(p[0], kTargets, 7);
  };
  check(net);
  const NetRun padded = run(net, Dtype::fp32, 0);
  for (size_t e = 0; e < padded.gradients[0].size(); ++e) {
    const bool counts = e % 16 < 7 && kTargets[e / 16] >= 0;
    if (counts) continue;
    EXPECT_EQ(padded.gradients[0][e], 0) << "element " << e << " has no part in the loss";
  }
}

// ---- used more than once

TEST(OpsGradient, FanOutInsideAUnit) {
  for (int uses : {2, 3}) {
    Net net;
    net.units = {{{shaped({2, 3, 5}), shaped({5, 5})}, [=](UnitCall& call, Inputs) {
                    const Value x = ops::gelu(call, source(call, call.parameter(0)));
                    Value y = ops::add(call, x, ops::linear(call, x, call.parameter(1), {}));
                    if (uses == 3) y = ops::add(call, ops::gelu(call, x), y);
                    return dot(call, y);
                  }}};
    net.reference = [=](const Parameters& p, const Keys&) {
      const Numbers x = in_double::gelu(p[0]);
      Numbers y = in_double::add(x, in_double::linear(x, p[1], nullptr, 5));
      if (uses == 3) y = in_double::add(in_double::gelu(x), y);
      return dot(y);
    };
    check(net);
  }
}

TEST(OpsGradient, AddOfAValueToItself) {
  Net net;
  net.units = {{{shaped({5, 33})}, [](UnitCall& call, Inputs) {
                  const Value x = source(call, call.parameter(0));
                  return dot(call, ops::add(call, x, x));
                }}};
  net.reference = [](const Parameters& p, const Keys&) { return dot(in_double::add(p[0], p[0])); };
  check(net);
}

// Unit 0's output goes to units 1 and 2, at `uses` 3 to the last one, too, and twice to unit 1.
TEST(OpsGradient, FanOutAcrossUnits) {
  for (int uses : {2, 3}) {
    Net net;
    net.units = {
        {{shaped({2, 3, 5})},
         [](UnitCall& call, Inputs) {
           return ops::dropout(call, ops::gelu(call, source(call, call.parameter(0))), 0.25f);
         }},
        {{shaped({5, 5})},
         [](UnitCall& call, Inputs inputs) {
           return ops::add(call, inputs[0], ops::linear(call, inputs[1], call.parameter(0), {}));
         }},
        {{shaped({5})},
         [](UnitCall& call, Inputs inputs) {
           return ops::layer_norm(call, inputs[0], call.parameter(0), {});
         }},
        {{},
         [=](UnitCall& call, Inputs inputs) {
           Value y = ops::add(call, inputs[0], ops::gelu(call, inputs[1]));
           if (uses == 3) y = ops::add(call, y, inputs[2]);
           return dot(call, y);
         }}};
    net.forward = [=](UnitRunner& run, const Batch&, const auto& units) {
      const Value x = run(*units[0], {});
      const Value a = run(*units[1], {x, x}), b = run(*units[2], {x});
      const Values loss = uses == 3 ? run(*units[3], {a, b, x}) : run(*units[3], {a, b});
      return Loss{loss[0], loss[1]};
    };
    net.reference = [=](const Parameters& p, const Keys& keys) {
      const Numbers x = in_double::dropout(in_double::gelu(p[0]), 0.25f, keys(0));
      const Numbers a = in_double::add(x, in_double::linear(x, p[1], nullptr, 5));
      Numbers y = in_double::add(a, in_double::gelu(in_double::layer_norm(x, p[2], nullptr)));
      if (uses == 3) y = in_double::add(y, x);
      return dot(y);
    };
    check(net);
  }
}

// Both outputs of unit 0 are one Value: recomputation moves what arrived for it once, not twice.
TEST(OpsGradient, AValueReturnedTwice) {
  Net net;
  net.units = {{{shaped({2, 3, 5})},
                [](UnitCall& call, Inputs) -> Values {
                  const Value x = ops::gelu(call, source(call, call.parameter(0)));
                  return {x, x};
                }},
               {{shaped({5, 5})}, [](UnitCall& call, Inputs inputs) {
                  const Value y = ops::linear(call, inputs[0], call.parameter(0), {});
                  return dot(call, ops::add(call, y, ops::gelu(call, inputs[1])));
                }}};
  net.forward = [](UnitRunner& run, const Batch&, const auto& units) {
    const Values x = run(*units[0], {});
    const Values loss = run(*units[1], {x[0], x[1]});
    return Loss{loss[0], loss[1]};
  };
  net.reference = [](const Parameters& p, const Keys&) {
    const Numbers x = in_double::gelu(p[0]);
    return dot(in_double::add(in_double::linear(x, p[1], nullptr, 5), in_double::gelu(x)));
  };
  check(net);
}

TEST(OpsGradient, AParameterUsedTwiceInAUnit) {
  Net net;
  net.units = {{{shaped({2, 3, 5}), shaped({5, 5}), shaped({5})}, [](UnitCall& call, Inputs) {
                  const ParameterRef w = call.parameter(1), b = call.parameter(2);
                  const Value x = source(call, call.parameter(0));
                  const Value hidden = ops::gelu(call, ops::linear(call, x, w, b));
                  return dot(call, ops::layer_norm(call, ops::linear(call, hidden, w, b), b, b));
                }}};
  net.reference = [](const Parameters& p, const Keys&) {
    const Numbers hidden = in_double::gelu(in_double::linear(p[0], p[1], &p[2], 5));
    return dot(in_double::layer_norm(in_double::linear(hidden, p[1], &p[2], 5), p[2], &p[2]));
  };
  check(net);
}

// The table is embedding and head, as in GPT-2: it is embedded twice, and one of the two calls
// receives no gradient.
TEST(OpsGradient, AParameterUsedByThreeCalls) {
  for (bool reached : {true, false}) {
    Net net;
    const LambdaUnit* owner = nullptr;
    net.units = {{{shaped({7, 5}, 16), shaped({kTime, 5})},
                  [](UnitCall& call, Inputs inputs) {
                    return ops::embedding(call, inputs[0], call.parameter(0), call.parameter(1));
                  }},
                 {{shaped({5})},
                  [=](UnitCall& call, Inputs inputs) {
                    const Value x = reached ? ops::add(call, inputs[0], inputs[1]) : inputs[0];
                    return ops::layer_norm(call, x, call.parameter(0), {});
                  }},
                 {{}, [&](UnitCall& call, Inputs inputs) {
                    const Value logits = ops::linear(call, inputs[0], {owner, 0}, {});
                    return ops::cross_entropy(call, logits, inputs[1], 7);
                  }}};
    net.forward = [&](UnitRunner& run, const Batch& batch, const auto& units) {
      owner = units[0].get();
      const Value first = run(*units[0], {batch.tokens}), second = run(*units[0], {batch.tokens});
      const Value x = run(*units[1], {first, second});
      const Values loss = run(*units[2], {x, batch.targets}, {owner});
      return Loss{loss[0], loss[1]};
    };
    net.reference = [=](const Parameters& p, const Keys&) {
      Numbers x = in_double::embedding(kTokens, kTime, p[0], &p[1], 5);
      if (reached) x = in_double::add(x, x);
      const Numbers normed = in_double::layer_norm(x, p[2], nullptr);
      return in_double::cross_entropy(in_double::linear(normed, p[0], nullptr, 5), kTargets, 7);
    };
    check(net);
  }
}

}  // namespace
}  // namespace shardrun
