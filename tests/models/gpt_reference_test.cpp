// A tiny GPT-2 against an independent implementation: loss and every element of every gradient.
// reference/make_reference.py wrote the numbers, in double; it also says what the files hold.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/kernels/reference.h"
#include "tests/models/plain_gpt.h"

namespace shardrun {
namespace {

struct Reference {
  double loss = 0;
  int64_t valid = 0;
  std::map<std::string, std::vector<double>> gradients;
};

Reference read_reference(const std::string& name) {
  std::ifstream file(std::string(SHARDRUN_REFERENCE_DIR) + "/" + name);
  Reference out;
  std::string word;
  int64_t count = 0;
  file >> word >> out.loss >> out.valid;
  EXPECT_EQ(word, "loss") << name << " is missing or broken";
  while (file >> word >> count) {
    std::vector<double>& gradient = out.gradients[word];
    gradient.resize(count);
    for (double& g : gradient) file >> g;
    EXPECT_FALSE(file.fail()) << word;
  }
  return out;
}

GptConfig tiny(bool bias) {
  GptConfig config;
  config.layers = 2;
  config.heads = 2;
  config.channels = 8;
  config.context = 6;
  config.vocabulary = 19;
  config.bias = bias;
  return config;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void set_parameters(PlainGpt& gpt) {
  gpt.for_each_parameter([&](const ParameterSpec& spec, ParameterRef ref) {
    const bool norm = ("." + spec.name).find(".ln_") != std::string::npos;
    const double mean = norm && ends_with(spec.name, ".weight") ? 1 : 0;
    double phase = 0;
    for (char c : spec.name) phase += static_cast<unsigned char>(c);
    const Tensor value = gpt.runner().value_of(ref);
    for (int64_t e = 0; e < spec.shape.numel(); ++e) {
      set(value.data(), value.dtype(), e,
          static_cast<float>(mean + 0.3 * std::sin(1.7 * static_cast<double>(e) + phase)));
    }
  });
}

PlainGpt::LossSum run(PlainGpt& gpt, float seed) {
  std::vector<int32_t> tokens, targets;
  for (int i = 0; i < 12; ++i) {
    tokens.push_back((7 * i + 3) % 19);
    targets.push_back(i % 5 == 4 ? -1 : (5 * i + 1) % 19);
  }
  return gpt.loss_and_gradients(tokens, targets, 2, seed);
}

// Relative to the largest element of the parameter's gradient; `worst` is for the record.
void compare(PlainGpt& gpt, const Reference& want, float seed, double bound) {
  double worst = 0;
  size_t compared = 0;
  gpt.for_each_parameter([&](const ParameterSpec& spec, ParameterRef ref) {
    SCOPED_TRACE(spec.name);
    ++compared;
    ASSERT_TRUE(want.gradients.count(spec.name)) << "not a parameter of the reference";
    const std::vector<double>& gradient = want.gradients.at(spec.name);
    ASSERT_EQ(static_cast<int64_t>(gradient.size()), spec.shape.numel());
    const float* got = gpt.runner().gradient_of(ref).as<float>();
    double largest = 0;
    for (double g : gradient) largest = std::max(largest, std::abs(g));
    ASSERT_GT(largest, 0);
    for (size_t e = 0; e < gradient.size(); ++e) {
      const double error = std::abs(got[e] / seed - gradient[e]) / largest;
      worst = std::max(worst, error);
      ASSERT_LE(error, bound) << "element " << e << " got " << got[e] / seed << " want "
                              << gradient[e];
    }
  });
  EXPECT_EQ(compared, want.gradients.size());
  std::printf("largest error of a gradient: %.2g of its parameter's largest\n", worst);
}

// Twice to three times what was measured over all instruction sets (2.0e-6 in fp32, 0.067 in bf16,
// 0.0059 in fp16). PyTorch itself is off by 2.1e-6 and 0.14 when it computes in fp32 and bf16.
constexpr double kFp32Bound = 6e-6;
constexpr double kRoundoffs = 32;  // sixteen bits: this many roundoffs of the dtype

class GptReference : public testing::TestWithParam<bool> {};

TEST_P(GptReference, LossAndGradientsInFp32) {
  const Reference want = read_reference(GetParam() ? "gpt_bias.txt" : "gpt_no_bias.txt");
  PlainGpt gpt(tiny(GetParam()));
  set_parameters(gpt);
  const PlainGpt::LossSum got = run(gpt, 1);
  EXPECT_EQ(got.valid, want.valid);
  EXPECT_NEAR(got.sum, want.loss, 1e-6 * want.loss);
  compare(gpt, want, 1, kFp32Bound);
}

TEST_P(GptReference, TheSeedScalesGradientsAndNotTheLoss) {
  const Reference want = read_reference(GetParam() ? "gpt_bias.txt" : "gpt_no_bias.txt");
  PlainGpt gpt(tiny(GetParam()));
  set_parameters(gpt);
  const float seed = 1024.0f / 12;
  EXPECT_NEAR(run(gpt, seed).sum, want.loss, 1e-6 * want.loss);
  compare(gpt, want, seed, kFp32Bound);
}

// Every parameter and activation is rounded, and so are the gradients between ops.
TEST_P(GptReference, SixteenBitsStayNear) {
  const Reference want = read_reference(GetParam() ? "gpt_bias.txt" : "gpt_no_bias.txt");
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    SCOPED_TRACE(name_of(dtype));
    PlainGpt gpt(tiny(GetParam()), {.activation_dtype = dtype});
    set_parameters(gpt);
    const double roundoff = unit_roundoff(dtype);
    EXPECT_NEAR(run(gpt, 1).sum, want.loss, 2 * roundoff * want.loss);
    compare(gpt, want, 1, kRoundoffs * roundoff);
  }
}

INSTANTIATE_TEST_SUITE_P(Biases, GptReference, testing::Bool(), [](const auto& info) {
  return info.param ? "Bias" : "NoBias";
});

}  // namespace
}  // namespace shardrun
