// What a GPT promises besides its numbers: sizes of the presets, padding that never shows, dropout
// and recomputation that repeat, initial values that do not depend on how they are cut.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/initialize.h"
#include "models/presets.h"
#include "tests/kernels/reference.h"
#include "tests/models/plain_gpt.h"

namespace shardrun {
namespace {

GptConfig small() {
  GptConfig config;
  config.layers = 3;
  config.heads = 2;
  config.channels = 32;
  config.context = 9;
  config.vocabulary = 61;
  config.bias = true;
  return config;
}

std::vector<int32_t> numbers(uint32_t seed, size_t count, int32_t below) {
  std::mt19937 engine(seed);
  std::vector<int32_t> out(count);
  for (int32_t& n : out) n = static_cast<int32_t>(engine() % static_cast<uint32_t>(below));
  return out;
}

PlainGpt::LossSum run(PlainGpt& gpt, bool training = true) {
  return gpt.loss_and_gradients(numbers(1, 27, 61), numbers(2, 27, 61), 3, 1.0f / 27, training);
}

// The published models' sizes.
TEST(Presets, CountTheirParameters) {
  const std::pair<const char*, int64_t> kCounts[] = {
      {"gpt2-124m", 124439808},
      {"gpt2-355m", 354823168},
      {"gpt2-774m", 774030080},
      {"gpt2-1558m", 1557611200},
      {"gpt-nano", 4 * (12 * 128 * 128 + 2 * 128) + 128 + (256 + 64) * 128},
  };
  EXPECT_EQ(preset_names().size(), std::size(kCounts));
  for (const auto& [name, count] : kCounts) {
    const GptConfig config = preset(name);
    EXPECT_EQ(Gpt(config).parameter_count(), count) << name;
    // The vocabulary only changes the token table; rows of padding are nobody's parameters.
    EXPECT_EQ(Gpt(preset(name, 1000)).parameter_count(),
              count - (config.vocabulary - 1000) * config.channels)
        << name;
  }
}

TEST(Presets, AnUnknownNameListsTheKnownOnes) {
  try {
    preset("gpt2-125m");
    FAIL() << "taken";
  } catch (const UsageError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("gpt2-125m"), std::string::npos) << what;
    for (const std::string& name : preset_names()) {
      EXPECT_NE(what.find(name), std::string::npos) << what;
    }
  }
}

TEST(Presets, FlopsPerToken) {
  // 6 (12 12 768^2 + 50257 768) + 6 12 768 1024
  EXPECT_EQ(flops_per_token(preset("gpt2-124m")), 797815296.0);
}

TEST(Gpt, ConfigurationsThatDoNotFitAreRefused) {
  GptConfig config = small();
  config.heads = 5;
  EXPECT_THROW(Gpt{config}, ConfigError);
  config = small();
  config.layers = 0;
  EXPECT_THROW(Gpt{config}, ConfigError);
}

TEST(Gpt, UnitsAndNames) {
  const Gpt gpt(small());
  std::vector<std::string> paths, names;
  for (const Unit* unit : gpt.units()) {
    paths.push_back(unit->path());
    for (const ParameterSpec& spec : unit->parameters()) names.push_back(spec.name);
  }
  EXPECT_EQ(paths, (std::vector<std::string>{"embedding", "h.0", "h.1", "h.2", "head"}));
  EXPECT_EQ(names.size(), 2u + 3 * 12 + 2);
  EXPECT_EQ(names[0], "wte.weight");
  EXPECT_EQ(names[1], "wpe.weight");
  EXPECT_EQ(names[2], "h.0.ln_1.weight");
  EXPECT_EQ(names[4], "h.0.attn.c_attn.weight");
  EXPECT_EQ(names.back(), "ln_f.bias");
}

TEST(Gpt, InitialValues) {
  GptConfig config = small();
  config.channels = 128;
  config.vocabulary = 500;
  PlainGpt gpt(config, {.seed = 7});
  gpt.runner().initialize(kernels::initialize_range);
  gpt.for_each_parameter([&](const ParameterSpec& spec, ParameterRef ref) {
    SCOPED_TRACE(spec.name);
    const float* value = gpt.runner().value_of(ref).as<float>();
    const int64_t count = spec.shape.numel();
    double sum = 0, squares = 0;
    for (int64_t e = 0; e < count; ++e) {
      sum += value[e];
      squares += value[e] * value[e];
    }
    const double n = static_cast<double>(count);
    if (spec.shape.rank() == 1) {
      const bool weight = spec.name.find("weight") != std::string::npos;
      EXPECT_EQ(sum, weight ? n : 0);
      EXPECT_EQ(squares, weight ? n : 0);
      return;
    }
    const bool residual = spec.name.find("c_proj") != std::string::npos;
    const double std = residual ? 0.02 / std::sqrt(6.0) : 0.02;
    EXPECT_NEAR(sum / n, 0, 5 * std / std::sqrt(n));
    EXPECT_NEAR(std::sqrt(squares / n), std, 5 * std / std::sqrt(2 * n));
    for (int64_t e = count; e < spec.padded_shape().numel(); ++e) ASSERT_EQ(value[e], 0.0f);
  });
}

// A rank fills its own slices: the cut must not show, nor what stands before.
TEST(Gpt, InitialValuesDoNotDependOnTheCut) {
  PlainGpt gpt(small(), {.seed = 7});
  const ParameterSpec& spec = gpt.model().units()[1]->parameters()[2];
  const int64_t count = spec.shape.numel();
  Array whole(Dtype::fp32, {count}), cut(Dtype::fp32, {count}), other(Dtype::fp32, {count});
  kernels::initialize_range(whole.tensor(), spec, 0, 7, gpt.stream());
  for (int64_t begin = 0; begin < count; begin += 257) {
    const int64_t size = std::min<int64_t>(257, count - begin);
    kernels::initialize_range(cut.tensor().flat(begin, size), spec, begin, 7, gpt.stream());
  }
  EXPECT_TRUE(whole.same_bits(cut));
  kernels::initialize_range(other.tensor(), spec, 0, 8, gpt.stream());
  EXPECT_FALSE(whole.same_bits(other)) << "the seed does not count";
  const ParameterSpec& sibling = gpt.model().units()[2]->parameters()[2];
  ASSERT_EQ(sibling.shape, spec.shape);
  kernels::initialize_range(other.tensor(), sibling, 0, 7, gpt.stream());
  EXPECT_FALSE(whole.same_bits(other)) << "the name does not count";
}

// Whatever stands in the rows of padding, loss and gradients have the same bits, and the padding's
// own gradient is zero.
TEST(Gpt, PaddedVocabularyNeverShows) {
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
    SCOPED_TRACE(name_of(dtype));
    PlainGpt clean(small(), {.activation_dtype = dtype});
    PlainGpt dirty(small(), {.activation_dtype = dtype});
    clean.runner().initialize(kernels::initialize_range);
    dirty.runner().initialize(kernels::initialize_range);
    const ParameterRef table{dirty.model().units()[0], 0};
    const ParameterSpec& spec = table.unit->parameters()[0];
    ASSERT_EQ(spec.padded_shape(), (Shape{64, 32}));
    const Tensor rows = dirty.runner().value_of(table);
    for (int64_t e = spec.shape.numel(); e < rows.numel(); ++e) {
      set(rows.data(), rows.dtype(), e, 1000);
    }
    const auto want = run(clean), got = run(dirty);
    EXPECT_EQ(got.sum, want.sum);
    EXPECT_EQ(got.valid, 27);
    EXPECT_NEAR(got.sum / 27, std::log(61), 0.1) << "an untrained model knows nothing";
    const auto gradients = dirty.gradients();
    EXPECT_EQ(gradients, clean.gradients());
    const float* gradient = dirty.runner().gradient_of(table).as<float>();
    for (int64_t e = spec.shape.numel(); e < rows.numel(); ++e) ASSERT_EQ(gradient[e], 0.0f);
  }
}

TEST(Gpt, RecomputationAndThreadsKeepTheBits) {
  GptConfig config = small();
  config.dropout = 0.2f;
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
    PlainGpt reference(config, {.activation_dtype = dtype});
    reference.runner().initialize(kernels::initialize_range);
    const float loss = run(reference).sum;
    const auto gradients = reference.gradients();
    for (int every : {0, 1, 2, 3}) {
      for (int threads : {1, 3}) {
        PlainGpt other(config, {.activation_dtype = dtype, .recompute_every = every}, threads);
        other.runner().initialize(kernels::initialize_range);
        EXPECT_EQ(run(other).sum, loss);
        EXPECT_EQ(other.gradients(), gradients)
            << name_of(dtype) << " recomputed every " << every << ", " << threads << " threads";
        EXPECT_EQ(run(other).sum, loss) << "the second run of a leaf differs";
        EXPECT_EQ(other.gradients(), gradients) << "the second run of a leaf differs";
        EXPECT_EQ(other.runner().pool().live(), 0) << "Values outlive the leaf";
      }
    }
  }
}

TEST(Gpt, DropoutIsForTrainingOnly) {
  GptConfig config = small();
  PlainGpt without(config);
  config.dropout = 0.2f;
  PlainGpt with(config), reseeded(config, {.seed = 2});
  for (PlainGpt* gpt : {&without, &with}) gpt->runner().initialize(kernels::initialize_range);
  EXPECT_EQ(run(with, false).sum, run(without, false).sum);
  EXPECT_EQ(run(without).sum, run(without, false).sum);
  EXPECT_NE(run(with).sum, run(with, false).sum);
  for (size_t u = 0; u < with.model().units().size(); ++u) {  // the same model under another seed
    for (size_t i = 0; i < with.model().units()[u]->parameters().size(); ++i) {
      const int index = static_cast<int>(i);
      const ConstTensor from = with.runner().value_of({with.model().units()[u], index});
      const Tensor to = reseeded.runner().value_of({reseeded.model().units()[u], index});
      std::memcpy(to.data(), from.data(), from.bytes());
    }
  }
  EXPECT_EQ(run(reseeded, false).sum, run(with, false).sum);
  EXPECT_NE(run(reseeded).sum, run(with).sum);
}

// Logits of a place do not know what comes after it.
TEST(Gpt, PredictionsLookBackOnly) {
  PlainGpt gpt(small());
  gpt.runner().initialize(kernels::initialize_range);
  std::vector<int32_t> tokens = numbers(1, 9, 61);
  const auto logits = [&](int64_t length) {
    gpt.runner().begin_leaf({}, false);
    const Value out = gpt.model().predict(
        gpt.runner(), gpt.runner().pool().wrap({tokens.data(), Dtype::int32, Shape{1, length}}));
    EXPECT_EQ(out.shape(), (Shape{1, length, 64}));
    const float* data = out.tensor().as<float>();
    return std::vector<float>(data, data + 61);
  };
  const std::vector<float> first = logits(9);
  tokens[8] = (tokens[8] + 1) % 61;
  EXPECT_EQ(logits(9), first);
  tokens[0] = (tokens[0] + 1) % 61;
  EXPECT_NE(logits(9), first);
}

}  // namespace
}  // namespace shardrun
