#include "models/gpt.h"

#include <cmath>

#include "kernels/ops/ops.h"

namespace shardrun {

double flops_per_token(const GptConfig& config) {
  const double layers = static_cast<double>(config.layers);
  const double channels = static_cast<double>(config.channels);
  const double products =
      12 * layers * channels * channels + static_cast<double>(config.vocabulary) * channels;
  return 6 * products + 6 * layers * channels * static_cast<double>(config.context);
}

namespace {

constexpr float kInitStd = 0.02f;

// A linear layer or a norm: the indices of its parameters in the unit.
struct Affine {
  int weight = -1, bias = -1;
};

ParameterRef ref(const UnitCall& call, int index) {
  return index < 0 ? ParameterRef() : call.parameter(index);
}

Value norm(UnitCall& call, const Value& x, const Affine& p) {
  return ops::layer_norm(call, x, ref(call, p.weight), ref(call, p.bias));
}

Value linear(UnitCall& call, const Value& x, const Affine& p) {
  return ops::linear(call, x, ref(call, p.weight), ref(call, p.bias));
}

class GptUnit : public Unit {
 public:
  using Unit::Unit;

 protected:
  Affine declare_norm(const std::string& name, const GptConfig& config) {
    Affine affine;
    affine.weight = declare({.name = name + ".weight", .shape = {config.channels}, .init_mean = 1});
    if (config.bias) affine.bias = declare({.name = name + ".bias", .shape = {config.channels}});
    return affine;
  }
  Affine declare_linear(const std::string& name, const GptConfig& config, int64_t out, int64_t in,
                        float std) {
    Affine affine;
    affine.weight = declare({.name = name + ".weight", .shape = {out, in}, .init_std = std});
    if (config.bias) affine.bias = declare({.name = name + ".bias", .shape = {out}});
    return affine;
  }
};

}  // namespace

class Gpt::Embedding : public GptUnit {
 public:
  explicit Embedding(const GptConfig& config) : GptUnit("embedding"), dropout_(config.dropout) {
    wte_ = declare({.name = "wte.weight",
                    .shape = {config.vocabulary, config.channels},
                    .init_std = kInitStd,
                    .padded_rows = config.padded_vocabulary()});
    wpe_ = declare({.name = "wpe.weight",
                    .shape = {config.context, config.channels},
                    .init_std = kInitStd});
  }

  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    const Value x_BTC =
        ops::embedding(call, inputs[0], call.parameter(wte_), call.parameter(wpe_));
    return ops::dropout(call, x_BTC, dropout_);
  }

  ParameterRef tokens() const { return {this, wte_}; }

 private:
  int wte_, wpe_;
  float dropout_;
};

class Gpt::Block : public GptUnit {
 public:
  Block(const GptConfig& config, int64_t number)
      : GptUnit(fmt::format("h.{}", number)), heads_(config.heads), dropout_(config.dropout) {
    const int64_t c = config.channels;
    // Branches that end in the residual stream start smaller, by the number of such branches.
    const float residual = kInitStd / std::sqrt(2.0f * static_cast<float>(config.layers));
    ln_1_ = declare_norm(path() + ".ln_1", config);
    c_attn_ = declare_linear(path() + ".attn.c_attn", config, 3 * c, c, kInitStd);
    attn_proj_ = declare_linear(path() + ".attn.c_proj", config, c, c, residual);
    ln_2_ = declare_norm(path() + ".ln_2", config);
    c_fc_ = declare_linear(path() + ".mlp.c_fc", config, 4 * c, c, kInitStd);
    mlp_proj_ = declare_linear(path() + ".mlp.c_proj", config, c, 4 * c, residual);
  }

  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    const Value middle_BTC = ops::add(call, inputs[0], attention(call, inputs[0]));
    return ops::add(call, middle_BTC, mlp(call, middle_BTC));
  }

 private:
  Value attention(UnitCall& call, const Value& x_BTC) const {
    const Value qkv_BT3C = linear(call, norm(call, x_BTC, ln_1_), c_attn_);
    const Value y_BTC = ops::attention(call, qkv_BT3C, heads_, true, dropout_);
    return ops::dropout(call, linear(call, y_BTC, attn_proj_), dropout_);
  }
  Value mlp(UnitCall& call, const Value& x_BTC) const {
    const Value hidden_BT4C = ops::gelu(call, linear(call, norm(call, x_BTC, ln_2_), c_fc_));
    return ops::dropout(call, linear(call, hidden_BT4C, mlp_proj_), dropout_);
  }

  int64_t heads_;
  float dropout_;
  Affine ln_1_, c_attn_, attn_proj_, ln_2_, c_fc_, mlp_proj_;
};

// Final norm and logits; with targets the loss, without them the logits themselves.
class Gpt::Head : public GptUnit {
 public:
  Head(const GptConfig& config, const Embedding& embedding)
      : GptUnit("head"), embedding_(embedding), vocabulary_(config.vocabulary) {
    ln_f_ = declare_norm("ln_f", config);
  }

  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    const Value x_BTC = norm(call, inputs[0], ln_f_);
    const Value logits_BTV = ops::linear(call, x_BTC, embedding_.tokens(), {});
    if (inputs.size() == 1) return logits_BTV;
    return ops::cross_entropy(call, logits_BTV, inputs[1], vocabulary_);
  }

 private:
  const Embedding& embedding_;
  int64_t vocabulary_;
  Affine ln_f_;
};

Gpt::Gpt(const GptConfig& config) : config_(config) {
  const int64_t sizes[] = {config.layers, config.heads, config.channels, config.context,
                           config.vocabulary};
  for (int64_t size : sizes) {
    if (size < 1) {
      throw ConfigError("GPT: got layers {}, heads {}, channels {}, context {}, vocabulary {}; wanted all >= 1",
                        config.layers, config.heads, config.channels, config.context,
                        config.vocabulary);
    }
  }
  if (config.channels % config.heads != 0) {
    throw ConfigError("GPT: {} channels do not divide among {} heads", config.channels,
                      config.heads);
  }
  embedding_ = std::make_unique<Embedding>(config);
  add(*embedding_);
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(std::make_unique<Block>(config, i));
    add(*blocks_.back());
  }
  head_ = std::make_unique<Head>(config, *embedding_);
  add(*head_);
}

Gpt::~Gpt() = default;

Loss Gpt::forward(UnitRunner& run, const Batch& batch) const {
  Value x_BTC = run(*embedding_, {batch.tokens});
  for (const auto& block : blocks_) x_BTC = run(*block, {x_BTC});
  const Values loss = run(*head_, {x_BTC, batch.targets}, {embedding_.get()});
  return {loss[0], loss[1]};
}

Value Gpt::predict(UnitRunner& run, const Value& tokens) const {
  Value x_BTC = run(*embedding_, {tokens});
  for (const auto& block : blocks_) x_BTC = run(*block, {x_BTC});
  return run(*head_, {x_BTC}, {embedding_.get()});
}

}  // namespace shardrun
