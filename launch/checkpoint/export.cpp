// A set's masters as a Hugging Face folder. hugging_face.h has the layout and the contract.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "kernels/math/convert.h"
#include "launch/checkpoint/hugging_face.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kBlock = int64_t{1} << 18;  // elements

struct Stored {
  std::string name;  // ours
  Shape shape;       // ours
  bool present = true;
  SafetensorsEntry entry;
};

// Every parameter that the published model has, in its order.
std::vector<Stored> plan_tensors(const GptConfig& config, const std::string& dtype) {
  GptConfig with_biases = config;
  with_biases.bias = true;
  const Gpt model(with_biases);
  std::vector<Stored> stored;
  for (const Unit* unit : model.units()) {
    for (const ParameterSpec& spec : unit->parameters()) {
      Stored tensor{spec.name, spec.shape, config.bias || !spec.name.ends_with(".bias"), {}};
      tensor.entry.name = "transformer." + spec.name;
      tensor.entry.dtype = dtype == "fp32" ? "F32" : dtype == "bf16" ? "BF16" : "F16";
      for (int d = 0; d < spec.shape.rank(); ++d) tensor.entry.shape.push_back(spec.shape[d]);
      if (is_transposed(spec.name)) std::swap(tensor.entry.shape[0], tensor.entry.shape[1]);
      stored.push_back(std::move(tensor));
    }
  }
  return stored;
}

class TensorWriter {
 public:
  TensorWriter(CheckpointReader& reader, OutputFile& file) : reader_(reader), file_(file) {}

  void write(const Stored& tensor) {
    const int64_t count = tensor.shape.numel();
    if (!tensor.present) {
      values_.assign(static_cast<size_t>(std::min(count, kBlock)), 0.0f);
      for (int64_t at = 0; at < count; at += kBlock) put(tensor, std::min(kBlock, count - at));
      return;
    }
    reader_.expect(tensor.name, TensorKind::master, tensor.shape);
    if (is_transposed(tensor.name)) return write_transposed(tensor);
    values_.resize(static_cast<size_t>(kBlock));
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t part = std::min(kBlock, count - at);
      reader_.read(tensor.name, TensorKind::master, at,
                   Tensor(values_.data(), Dtype::fp32, {part}));
      put(tensor, part);
    }
  }

 private:
  // As many of their rows (our columns) as fit into the bound are gathered in one pass over ours.
  void write_transposed(const Stored& tensor) {
    const int64_t outputs = tensor.shape[0], inputs = tensor.shape[1];
    const int64_t rows = std::clamp<int64_t>(kTransposeBytes / 4 / outputs, 1, inputs);
    const int64_t at_once = std::max<int64_t>(1, kBlock / inputs);
    source_.resize(static_cast<size_t>(at_once * inputs));
    for (int64_t i0 = 0; i0 < inputs; i0 += rows) {
      const int64_t i1 = std::min(inputs, i0 + rows);
      values_.resize(static_cast<size_t>((i1 - i0) * outputs));
      for (int64_t o0 = 0; o0 < outputs; o0 += at_once) {
        const int64_t n = std::min(at_once, outputs - o0);
        reader_.read(tensor.name, TensorKind::master, o0 * inputs,
                     Tensor(source_.data(), Dtype::fp32, {n * inputs}));
        for (int64_t i = i0; i < i1; ++i) {
          float* to = values_.data() + (i - i0) * outputs + o0;
          for (int64_t k = 0; k < n; ++k) to[k] = source_[static_cast<size_t>(k * inputs + i)];
        }
      }
      put(tensor, (i1 - i0) * outputs);
    }
  }

  void put(const Stored& tensor, int64_t count) {
    if (tensor.entry.dtype == "F32") {
      file_.write(std::as_bytes(std::span(values_)).first(static_cast<size_t>(count) * 4));
      return;
    }
    narrow_.resize(static_cast<size_t>(std::min(count, kBlock)));
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t part = std::min(kBlock, count - at);
      for (int64_t i = 0; i < part; ++i) {
        narrow_[static_cast<size_t>(i)] = narrow(tensor, values_[static_cast<size_t>(at + i)]);
      }
      file_.write(std::as_bytes(std::span(narrow_)).first(static_cast<size_t>(part) * 2));
    }
  }

  static uint16_t narrow(const Stored& tensor, float value) {
    if (tensor.entry.dtype == "BF16") {
      Bf16 out;
      math::narrow(value, out);
      return out.bits;
    }
    Fp16 out;
    math::narrow(value, out);
    if ((out.bits & 0x7fff) == 0x7c00 && std::isfinite(value)) {
      throw DataError("`{}`: {} does not fit into fp16; export as bf16 or fp32", tensor.name,
                      value);
    }
    return out.bits;
  }

  CheckpointReader& reader_;
  OutputFile& file_;
  std::vector<float> values_, source_;
  std::vector<uint16_t> narrow_;
};

void write_text(const fs::path& path, const std::string& text) {
  OutputFile file = OutputFile::create(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
}

std::string config_json(const GptConfig& config, const std::string& dtype) {
  const bool gpt2_text = config.vocabulary == 50257;  // <|endoftext|> is the last
  Json json{{"architectures", {"GPT2LMHeadModel"}},
            {"model_type", "gpt2"},
            {"activation_function", "gelu_new"},
            {"n_layer", config.layers},
            {"n_head", config.heads},
            {"n_embd", config.channels},
            {"n_positions", config.context},
            {"n_ctx", config.context},
            {"n_inner", nullptr},
            {"vocab_size", config.vocabulary},
            {"layer_norm_epsilon", 1e-5},
            {"initializer_range", 0.02},
            {"attn_pdrop", config.dropout},
            {"embd_pdrop", config.dropout},
            {"resid_pdrop", config.dropout},
            {"scale_attn_weights", true},
            {"tie_word_embeddings", true},
            {"torch_dtype", dtype == "fp32"   ? "float32"
                            : dtype == "bf16" ? "bfloat16"
                                              : "float16"}};
  json["bos_token_id"] = json["eos_token_id"] = gpt2_text ? Json(50256) : Json(nullptr);
  return json.dump(2) + "\n";
}

}  // namespace

void export_gpt2(const fs::path& folder, CheckpointReader& reader, const GptConfig& config,
                 const ExportOptions& options,
                 const std::vector<std::pair<fs::path, std::string>>& tokenizer_files) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(folder, error))) {
    throw CannotCreateError("{}: is there already, wanted a new folder", folder.string());
  }
  fs::path building = folder.lexically_normal();
  if (!building.has_filename()) building = building.parent_path();
  const fs::path final = building;
  building += ".partial";
  remove_tree(building);
  fs::create_directories(building, error);
  if (error) throw CannotCreateError("{}: {}", building.string(), error.message());

  std::vector<Stored> tensors = plan_tensors(config, options.dtype);
  std::vector<std::vector<Stored*>> files;
  int64_t bytes = 0, total = 0;
  for (Stored& tensor : tensors) {
    const int64_t size = tensor.shape.numel() * safetensors_element_size(tensor.entry.dtype);
    if (files.empty() || size > options.shard_bytes - bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(&tensor);
    bytes += size;
    total += size;
  }
  Json index{{"metadata", {{"total_size", total}}}, {"weight_map", Json::object()}};
  for (size_t f = 0; f < files.size(); ++f) {
    const std::string name =
        files.size() == 1 ? "model.safetensors"
                          : fmt::format("model-{:05d}-of-{:05d}.safetensors", f + 1, files.size());
    std::vector<SafetensorsEntry> entries;
    for (const Stored* tensor : files[f]) {
      entries.push_back(tensor->entry);
      index["weight_map"][tensor->entry.name] = name;
    }
    OutputFile file = OutputFile::create(building / name);
    const std::string header = safetensors_header(entries);
    file.write(std::as_bytes(std::span(header)));
    TensorWriter writer(reader, file);
    for (const Stored* tensor : files[f]) writer.write(*tensor);
    file.finish();
  }
  if (files.size() > 1) write_text(building / "model.safetensors.index.json", index.dump(2) + "\n");
  write_text(building / "config.json", config_json(config, options.dtype));
  for (const auto& [from, name] : tokenizer_files) {
    fs::copy_file(from, building / name, error);
    if (error) throw IoError("{}: cannot copy: {}", from.string(), error.message());
  }
  sync_folder(building);
  fs::rename(building, final, error);
  if (error) throw CannotCreateError("{}: cannot rename: {}", building.string(), error.message());
  sync_folder(final.parent_path().empty() ? "." : final.parent_path());
}

}  // namespace shardrun
