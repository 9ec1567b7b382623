#include "launch/checkpoint/hugging_face.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "kernels/math/convert.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kLargestJson = int64_t{64} << 20;
constexpr int64_t kReadBytes = int64_t{1} << 20;
constexpr int64_t kShortRun = 16384;  // bytes
constexpr const char* kPrefix = "transformer.";
constexpr const char* kIndex = "model.safetensors.index.json";

// A small JSON file of a stranger's. Depth is judged before the parser sees it.
Json read_json(const fs::path& path) {
  const InputFile file = InputFile::open(path);
  if (file.bytes() > kLargestJson) {
    throw DataError("{}: got {} bytes, wanted at most {}", path.string(), file.bytes(),
                    kLargestJson);
  }
  std::string text(static_cast<size_t>(file.bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && (text[i] == '{' || text[i] == '[')) {
      if (++depth > 32) throw DataError("{}: nested deeper than 32", path.string());
    } else if (!quoted && (text[i] == '}' || text[i] == ']')) {
      --depth;
    }
  }
  Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) throw DataError("{}: not a JSON object", path.string());
  return json;
}

int64_t positive(const Json& json, const fs::path& path, const char* key, const char* other = "") {
  const auto found = json.contains(key) ? json.find(key) : json.find(other);
  if (found == json.end()) throw DataError("{}: `{}` is missing", path.string(), key);
  if (!found->is_number_integer() || found->get<int64_t>() < 1 ||
      found->get<int64_t>() > INT32_MAX) {
    throw DataError("{}: `{}`: got {}, wanted a whole number from 1 to 2^31 - 1", path.string(),
                    key, found->dump().substr(0, 40));
  }
  return found->get<int64_t>();
}

// Refuses another value than one of `wanted`; a key that is absent is fine.
void require(const Json& json, const fs::path& path, const char* key,
             const std::vector<Json>& wanted) {
  const auto found = json.find(key);
  if (found == json.end() || std::find(wanted.begin(), wanted.end(), *found) != wanted.end())
    return;
  throw DataError("{}: `{}`: got {}, wanted {}: this GPT-2 computes otherwise", path.string(), key,
                  found->dump().substr(0, 60), wanted[0].dump());
}

GptConfig read_config(const fs::path& path) {
  const Json json = read_json(path);
  if (!json.contains("model_type") || json["model_type"] != "gpt2") {
    throw DataError(
        "{}: `model_type`: got {}, wanted \"gpt2\"", path.string(),
        json.contains("model_type") ? json["model_type"].dump().substr(0, 40) : "nothing");
  }
  GptConfig config;
  config.layers = positive(json, path, "n_layer");
  config.heads = positive(json, path, "n_head");
  config.channels = positive(json, path, "n_embd");
  config.context = positive(json, path, "n_positions", "n_ctx");
  config.vocabulary = positive(json, path, "vocab_size");
  config.bias = true;
  require(json, path, "activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  require(json, path, "n_inner", {nullptr, 4 * config.channels});
  require(json, path, "layer_norm_epsilon", {1e-5});
  require(json, path, "scale_attn_weights", {true});
  require(json, path, "scale_attn_by_inverse_layer_idx", {false});
  require(json, path, "add_cross_attention", {false});
  require(json, path, "tie_word_embeddings", {true});
  return config;
}

// The weight files, in the order of their names; the index, where there is one, says in which file
// a tensor must be.
std::set<std::string> weight_files(const fs::path& folder,
                                   std::map<std::string, std::string>& map) {
  std::error_code error;
  if (!fs::exists(folder / kIndex, error)) {
    if (!fs::exists(folder / "model.safetensors", error)) {
      throw NoInputError("{}: neither model.safetensors nor {} is there{}", folder.string(), kIndex,
                         fs::exists(folder / "pytorch_model.bin", error)
                             ? "; pytorch_model.bin is a program and is not read"
                             : "");
    }
    return {"model.safetensors"};
  }
  const fs::path path = folder / kIndex;
  const Json json = read_json(path);
  const auto found = json.find("weight_map");
  if (found == json.end() || !found->is_object() || found->empty()) {
    throw DataError("{}: `weight_map` is missing", path.string());
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : found->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    // A name in the folder and nowhere else.
    if (name.empty() || name[0] == '.' ||
        name.find_first_of(std::string("/\\\0", 3)) != name.npos) {
      throw DataError("{}: `{}`: got the file {}, wanted a name in the folder", path.string(),
                      tensor.substr(0, 60), file.dump().substr(0, 60));
    }
    if (files.insert(name).second && files.size() > 4096) {
      throw DataError("{}: more than 4096 files", path.string());
    }
    map[tensor] = name;
  }
  return files;
}

bool is_mask(const std::string& name) {
  return name.starts_with("h.") &&
         (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// The shape that the parameter has there.
std::vector<int64_t> stored_shape(const ParameterSpec& spec) {
  std::vector<int64_t> shape;
  for (int d = 0; d < spec.shape.rank(); ++d) shape.push_back(spec.shape[d]);
  if (is_transposed(spec.name)) std::swap(shape[0], shape[1]);
  return shape;
}

template <typename T>
void widen_all(const std::byte* in, int64_t count, float* out) {
  const auto* values = reinterpret_cast<const T*>(in);
  for (int64_t i = 0; i < count; ++i) out[i] = math::widen(values[i]);
}

// "a, b, c, d, e and 7 more".
std::string first_few(const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 5);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

bool is_transposed(const std::string& name) {
  for (const char* end : {".c_attn.weight", ".c_proj.weight", ".c_fc.weight"}) {
    if (name.ends_with(end)) return true;
  }
  return false;
}

bool HuggingFaceFolder::is_one(const fs::path& path) {
  std::error_code error;
  for (const char* name : {"config.json", "model.safetensors", kIndex, "pytorch_model.bin"}) {
    if (fs::exists(path / name, error)) return true;
  }
  return false;
}

HuggingFaceFolder HuggingFaceFolder::open(const fs::path& path) {
  HuggingFaceFolder result;
  result.folder_ = path;
  result.config_ = read_config(path / "config.json");
  std::map<std::string, std::string> map;
  for (const std::string& name : weight_files(path, map)) {
    auto file = std::make_unique<SafetensorsFile>(SafetensorsFile::open(path / name));
    for (const SafetensorsEntry& entry : file->entries()) {
      if (!map.empty()) {
        const auto listed = map.find(entry.name);
        if (listed == map.end() || listed->second != name) {
          throw DataError("{}: holds `{}`, which {} does not say", file->path().string(),
                          entry.name, kIndex);
        }
        map.erase(listed);
        if (map.empty()) map[""] = "";  // all were found; one more would be a surplus
      }
      std::string own = entry.name;
      if (own.starts_with(kPrefix)) own = own.substr(std::string(kPrefix).size());
      if (!result.places_.emplace(own, Place{result.files_.size(), &entry}).second) {
        throw DataError("{}: `{}` is there twice", file->path().string(), own);
      }
    }
    result.files_.push_back(std::move(file));
  }
  map.erase("");
  if (!map.empty()) {
    throw DataError("{}: `{}` is not in {}", (path / kIndex).string(), map.begin()->first,
                    map.begin()->second);
  }
  return result;
}

const HuggingFaceFolder::Place& HuggingFaceFolder::find(const std::string& name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) throw DataError("{}: `{}` is missing", folder_.string(), name);
  return found->second;
}

void HuggingFaceFolder::check(const Model& model) {
  std::vector<std::string> missing, surplus, wrong;
  std::set<std::string> wanted;
  for (const Unit* unit : model.units()) {
    for (const ParameterSpec& spec : unit->parameters()) {
      wanted.insert(spec.name);
      const auto found = places_.find(spec.name);
      if (found == places_.end()) {
        missing.push_back(spec.name);
        continue;
      }
      const SafetensorsEntry& entry = *found->second.entry;
      const std::vector<int64_t> shape = stored_shape(spec);
      const bool positions = spec.name == "wpe.weight" && entry.shape.size() == 2 &&
                             entry.shape[1] == shape[1] && entry.shape[0] >= shape[0];
      if (entry.shape != shape && !positions) {
        wrong.push_back(fmt::format("{}: got {}, wanted {}", spec.name, shape_text(entry.shape),
                                    shape_text(shape)));
      } else if (entry.dtype != "F32" && entry.dtype != "F16" && entry.dtype != "BF16") {
        wrong.push_back(fmt::format("{}: got {}, wanted F32, F16 or BF16", spec.name, entry.dtype));
      }
    }
  }
  for (const auto& [name, place] : places_) {
    if (!wanted.contains(name) && name != "lm_head.weight" && !is_mask(name))
      surplus.push_back(name);
  }
  std::string problems;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) problems += fmt::format("; {}: {}", what, first_few(names));
  };
  add("missing", missing);
  add("not of the model", surplus);
  add("wrong", wrong);
  if (!problems.empty()) throw DataError("{}{}", folder_.string(), problems);
  if (places_.contains("lm_head.weight")) check_head();
}

void HuggingFaceFolder::check_head() {
  const Place& head = find("lm_head.weight");
  const Place& wte = find("wte.weight");
  bool equal = head.entry->shape == wte.entry->shape && head.entry->dtype == wte.entry->dtype;
  std::vector<std::byte> a(kReadBytes), b(kReadBytes);
  const int64_t bytes = wte.entry->end - wte.entry->begin;
  for (int64_t at = 0; equal && at < bytes; at += kReadBytes) {
    const auto part = static_cast<size_t>(std::min(kReadBytes, bytes - at));
    files_[head.file]->read(head.entry->begin + at, std::span(a).first(part));
    files_[wte.file]->read(wte.entry->begin + at, std::span(b).first(part));
    equal = std::equal(a.begin(), a.begin() + static_cast<int64_t>(part), b.begin());
  }
  if (!equal) {
    throw DataError(
        "{}: `lm_head.weight` differs from `wte.weight`: a head of its own is not built",
        folder_.string());
  }
}

void HuggingFaceFolder::read_elements(const Place& place, int64_t begin, int64_t count,
                                      float* out) {
  const SafetensorsEntry& entry = *place.entry;
  const int64_t size = safetensors_element_size(entry.dtype);
  bytes_.resize(kReadBytes);
  for (int64_t at = 0; at < count; at += kReadBytes / size) {
    const int64_t part = std::min(count - at, kReadBytes / size);
    files_[place.file]->read(entry.begin + (begin + at) * size,
                             std::span(bytes_).first(static_cast<size_t>(part * size)));
    if (entry.dtype == "F32") {
      widen_all<float>(bytes_.data(), part, out + at);
    } else if (entry.dtype == "F16") {
      widen_all<Fp16>(bytes_.data(), part, out + at);
    } else {
      widen_all<Bf16>(bytes_.data(), part, out + at);
    }
  }
}

void HuggingFaceFolder::read(const ParameterSpec& spec, int64_t begin, Tensor out) {
  const Place& place = find(spec.name);
  const int64_t count = out.numel();
  const auto give = [&](int64_t at, const float* values, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t to = at + i * stride;
      if (to < 0 || to >= count) continue;  // a row that the range only touches
      if (out.dtype() == Dtype::fp32) {
        out.as<float>()[to] = values[i];
      } else {
        math::narrow(values[i], out.as<Bf16>()[to]);
      }
    }
  };
  if (!is_transposed(spec.name)) {
    const int64_t step = kReadBytes / 4;
    rows_.resize(static_cast<size_t>(step));
    for (int64_t at = 0; at < count; at += step) {
      const int64_t part = std::min(step, count - at);
      read_elements(place, begin + at, part, rows_.data());
      give(at, rows_.data(), part, 1);
    }
    return;
  }
  // Our rows [o0, o1) are columns there: of each of its rows a run of o1 - o0. Short runs are read
  // with the whole row around them.
  const int64_t outputs = spec.shape[0], inputs = spec.shape[1];
  const int64_t o0 = begin / inputs, o1 = (begin + count + inputs - 1) / inputs;
  const bool whole = (o1 - o0) * 4 < kShortRun;
  const int64_t from = whole ? 0 : o0, width = whole ? outputs : o1 - o0;
  const int64_t at_once = whole ? std::clamp<int64_t>(kReadBytes / 4 / outputs, 1, inputs) : 1;
  rows_.resize(static_cast<size_t>(width * at_once));
  for (int64_t i = 0; count > 0 && i < inputs; i += at_once) {
    const int64_t n = std::min(at_once, inputs - i);
    read_elements(place, i * outputs + from, whole ? n * width : width, rows_.data());
    for (int64_t k = 0; k < n; ++k) {
      give(o0 * inputs + i + k - begin, rows_.data() + k * width + (o0 - from), o1 - o0, inputs);
    }
  }
}

std::vector<fs::path> tokenizer_files_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const char* name :
       {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "generation_config.json"}) {
    if (fs::is_regular_file(folder / name, error)) found.push_back(folder / name);
  }
  return found;
}

}  // namespace shardrun
