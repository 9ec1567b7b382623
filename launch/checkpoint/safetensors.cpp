#include "launch/checkpoint/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "runtime/error.h"

namespace shardrun {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr size_t kMostDims = 32;

constexpr std::pair<const char*, int64_t> kSizes[] = {
    {"F64", 8},     {"I64", 8},     {"U64", 8},  {"F32", 4}, {"I32", 4},
    {"U32", 4},     {"F16", 2},     {"BF16", 2}, {"I16", 2}, {"U16", 2},
    {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1},   {"U8", 1},  {"BOOL", 1}};

// Takes the header event by event: a document that is not of the one allowed form is refused where it
// leaves it, so neither depth nor size of hostile JSON costs memory.
class HeaderParser : public nlohmann::json_sax<Json> {
 public:
  std::vector<SafetensorsEntry> entries;
  std::string problem;

  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("a boolean"); }
  bool number_integer(number_integer_t) override { return wrong("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    return wrong("the number " + text.substr(0, 40));
  }
  bool binary(binary_t&) override { return wrong("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return wrong("a number");
    if (value > INT64_MAX) return wrong("a number above 2^63");
    std::vector<int64_t>& to = place_ == Place::shape ? entries.back().shape : offsets_;
    if (to.size() >= (place_ == Place::shape ? kMostDims : 2)) return wrong("one number more");
    to.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata && depth_ == 2) return true;
    if (place_ != Place::dtype) return wrong("a text");
    entries.back().dtype = value.substr(0, 16);
    place_ = Place::tensor;
    return true;
  }

  bool start_object(size_t) override {
    ++depth_;
    if (depth_ == 1) return true;
    if (depth_ == 2 && place_ == Place::metadata) return true;
    if (depth_ == 2 && place_ == Place::name) {
      place_ = Place::tensor;
      fields_.clear();
      offsets_.clear();
      return true;
    }
    return wrong("an object");
  }

  bool key(string_t& key) override {
    if (depth_ == 1) {
      if (key.size() > 4096) return fail("a name is longer than 4096 bytes");
      if (!names_.insert(key).second) return fail("the name `" + key + "` comes twice");
      place_ = Place::metadata;
      if (key == "__metadata__") return true;
      place_ = Place::name;
      entries.push_back({});
      entries.back().name = key;
      return true;
    }
    if (place_ == Place::metadata) return true;
    place_ = key == "dtype"          ? Place::dtype
             : key == "shape"        ? Place::shape_key
             : key == "data_offsets" ? Place::offsets_key
                                     : Place::name;
    if (place_ == Place::name) return wrong("the key `" + key.substr(0, 40) + "`");
    if (!fields_.insert(key).second) return wrong("`" + key + "` twice");
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ != 1 || place_ == Place::metadata) return true;
    if (fields_.size() != 3 || offsets_.size() != 2) {
      return wrong("not all of dtype, shape and two data_offsets");
    }
    entries.back().begin = offsets_[0];
    entries.back().end = offsets_[1];
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::shape_key) {
      place_ = Place::shape;
    } else if (place_ == Place::offsets_key) {
      place_ = Place::offsets;
    } else {
      return wrong("an array");
    }
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t at, const std::string&, const nlohmann::detail::exception&) override {
    return fail(fmt::format("its header is no JSON at byte {}", at));
  }

 private:
  enum class Place { name, metadata, tensor, dtype, shape_key, shape, offsets_key, offsets };

  bool fail(std::string what) {
    problem = std::move(what);
    return false;
  }
  bool wrong(const std::string& got) {
    return fail(fmt::format("{}: got {}, wanted {{dtype, shape, data_offsets}} of each tensor",
                            entries.empty() ? "the header" : "`" + entries.back().name + "`", got));
  }

  Place place_ = Place::name;
  int depth_ = 0;
  std::set<std::string> names_, fields_;
  std::vector<int64_t> offsets_;
};

// Offsets in the header count from its end: makes them offsets in the file, and checks them.
void place_entries(std::vector<SafetensorsEntry>& entries, int64_t data_begin, int64_t file_bytes) {
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t at = 0;
  for (SafetensorsEntry& entry : entries) {
    int64_t bytes = safetensors_element_size(entry.dtype);
    if (bytes == 0) {
      throw DataError("`{}`: got dtype {}, which is not known", entry.name, entry.dtype);
    }
    for (const int64_t dim : entry.shape) {
      if (__builtin_mul_overflow(bytes, dim, &bytes)) {
        throw DataError("`{}`: its shape overflows", entry.name);
      }
    }
    if (entry.begin != at) {
      throw DataError("`{}`: begins at byte {} where {} comes next: a gap or an overlap",
                      entry.name, entry.begin, at);
    }
    if (entry.end < entry.begin || entry.end > data_bytes || entry.end - entry.begin != bytes) {
      throw DataError("`{}`: got bytes [{}, {}) of {}, wanted {} bytes for its shape", entry.name,
                      entry.begin, entry.end, data_bytes, bytes);
    }
    at = entry.end;
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  if (at != data_bytes) {
    throw DataError("got {} bytes of data, wanted {}: cut off or not a safetensors file",
                    data_bytes, at);
  }
}

std::vector<SafetensorsEntry> read_header(const InputFile& file) {
  unsigned char raw[8];
  if (file.bytes() < 8) throw DataError("got {} bytes, wanted a header", file.bytes());
  file.read(0, std::as_writable_bytes(std::span(raw)));
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | raw[i];
  if (length > static_cast<uint64_t>(std::min(kLongestHeader, file.bytes() - 8))) {
    throw DataError("got a header of {} bytes in a file of {}, wanted at most {}", length,
                    file.bytes(), std::min(kLongestHeader, file.bytes() - 8));
  }
  std::string text(length, '\0');
  file.read(8, std::as_writable_bytes(std::span(text)));
  if (text.empty() || text[0] != '{') throw DataError("its header does not begin with {{");
  HeaderParser parser;
  if (!Json::sax_parse(text, &parser)) throw DataError("{}", parser.problem);
  place_entries(parser.entries, static_cast<int64_t>(length) + 8, file.bytes());
  return std::move(parser.entries);
}

}  // namespace

int64_t SafetensorsEntry::numel() const {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

int64_t safetensors_element_size(const std::string& dtype) {
  for (const auto& [name, size] : kSizes) {
    if (dtype == name) return size;
  }
  return 0;
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile result;
  result.file_ = InputFile::open(path);
  try {
    result.entries_ = read_header(result.file_);
  } catch (const DataError& error) {
    throw DataError("{}: {}", path.string(), error.what());
  }
  return result;
}

std::string safetensors_header(std::vector<SafetensorsEntry>& entries) {
  // transformers reads no file without this format.
  nlohmann::ordered_json json{{"__metadata__", {{"format", "pt"}}}};
  int64_t at = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.begin = at;
    entry.end = at + entry.numel() * safetensors_element_size(entry.dtype);
    at = entry.end;
    json[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins at a multiple of 8
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i)
    length[static_cast<size_t>(i)] = static_cast<char>(text.size() >> (8 * i));
  for (SafetensorsEntry& entry : entries) {
    entry.begin += static_cast<int64_t>(text.size()) + 8;
    entry.end += static_cast<int64_t>(text.size()) + 8;
  }
  return length + text;
}

}  // namespace shardrun
