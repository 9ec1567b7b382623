// GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, tanh GELU, head tied to the token
// embedding. Parameter names are those of its published checkpoints, linear weights stored [out, in].
//
// Shape suffixes: B batch, T time, C channels, V vocabulary (padded).
#pragma once

#include <memory>
#include <vector>

#include "runtime/unit_runner.h"

namespace shardrun {

struct GptConfig {
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t channels = 128;
  int64_t context = 64;      // longest sequence
  int64_t vocabulary = 256;
  bool bias = false;         // in linear layers and norms
  float dropout = 0;         // of embeddings, attention and residual branches

  // Rows of the token table in memory: matrix products like multiples of 64.
  int64_t padded_vocabulary() const { return (vocabulary + 63) / 64 * 64; }
};

// Forward and backward of one token, 6 N_mm + 6 L C T with N_mm = 12 L C^2 + V C: matrix products of
// parameters, and causal attention over T tokens.
double flops_per_token(const GptConfig& config);

class Gpt : public Model {
 public:
  // ConfigError for sizes that do not fit.
  explicit Gpt(const GptConfig& config);
  ~Gpt() override;

  Loss forward(UnitRunner& run, const Batch& batch) const override;
  Value predict(UnitRunner& run, const Value& tokens) const override;
  int64_t vocabulary() const override { return config_.vocabulary; }
  const GptConfig& config() const { return config_; }

 private:
  class Embedding;
  class Block;
  class Head;
  GptConfig config_;
  std::unique_ptr<Embedding> embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Head> head_;
};

}  // namespace shardrun
