// GPT-2 in a Hugging Face folder: config.json, model.safetensors or several files with an index, and
// the tokenizer's files. Read by `train --init-from` and `checkpoint import`, written by
// `checkpoint export`.
//
// [Note: GPT-2's layout] Names are ours, perhaps behind "transformer."; weights of linear layers lie
// transposed, [in, out]; the head is not stored, it is wte. Old files hold each block's causal mask
// (attn.bias, attn.masked_bias), which is no parameter. There are always biases.
//
// Reading takes a row or 1 MiB, writing kTransposeBytes, whatever the size of the model.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch/checkpoint/safetensors.h"
#include "models/gpt.h"
#include "sharding/snapshot.h"

namespace shardrun {

class Config;

inline constexpr int64_t kTransposeBytes = int64_t{16} << 20;

class HuggingFaceFolder : public ParameterSource {
 public:
  // Whether `path` looks like one: has a config.json or such weights.
  static bool is_one(const std::filesystem::path& path);

  // Opens every file and reads every header. NoInputError for what is missing, DataError for what is
  // wrong, not GPT-2, or not computed the way that models/gpt.h does.
  static HuggingFaceFolder open(const std::filesystem::path& path);

  const std::filesystem::path& folder() const { return folder_; }
  const GptConfig& config() const { return config_; }  // bias true, dropout 0

  // DataError unless the folder holds each parameter of `model` in its shape and a known dtype, and
  // nothing besides, naming up to five of each. A model with a shorter context takes the first
  // positions. An lm_head that is stored must equal wte.
  void check(const Model& model);

  // [begin, begin + out.numel()) of the parameter as the model has it, fp32 or bf16.
  void read(const ParameterSpec& spec, int64_t begin, Tensor out) override;

 private:
  struct Place {
    size_t file = 0;
    const SafetensorsEntry* entry = nullptr;
  };
  const Place& find(const std::string& name) const;
  void read_elements(const Place& place, int64_t begin, int64_t count, float* out);
  void check_head();

  std::filesystem::path folder_;
  GptConfig config_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;  // without the prefix
  std::vector<std::byte> bytes_;
  std::vector<float> rows_;
};

struct ExportOptions {
  std::string dtype = "fp32";       // fp32, bf16, fp16
  int64_t shard_bytes = INT64_MAX;  // largest file; a tensor is never cut
};

// Writes `folder`, which must not exist, from the masters of a set of this model; first under
// another name, so that it is whole or not there. Biases that the model lacks are written as zeros.
// DataError where a value does not fit into fp16. `tokenizer_files`: (where, name in the folder).
void export_gpt2(const std::filesystem::path& folder, CheckpointReader& reader,
                 const GptConfig& config, const ExportOptions& options,
                 const std::vector<std::pair<std::filesystem::path, std::string>>& tokenizer_files);

// Writes OUT/checkpoints/step-00000000 with masters only, and OUT/tokenizer/; returns the set's
// folder. CannotCreateError where `out` holds sets already.
std::string import_gpt2(const std::filesystem::path& from, const std::filesystem::path& out);

// Sets what `given` does not say of the model: nothing where it names one.
void adopt_model(Config& config, const Config& given, const GptConfig& model);

// The tokenizer's files in a Hugging Face folder that are there.
std::vector<std::filesystem::path> tokenizer_files_in(const std::filesystem::path& folder);

// Whether a parameter lies transposed there.
bool is_transposed(const std::string& name);

}  // namespace shardrun
