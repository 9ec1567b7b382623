// The safetensors file format: u64 header length in little endian, a JSON header, tensor bytes. Used
// by hugging_face.cpp. Files come from strangers: nothing in one is believed before it is checked,
// and memory is bounded by the length of the header, whatever it says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "sharding/checkpoint/file.h"

namespace shardrun {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes in the file

  int64_t numel() const;
};

// Bytes of an element; 0 for a dtype that is not known.
int64_t safetensors_element_size(const std::string& dtype);

class SafetensorsFile {
 public:
  // NoInputError where it cannot be read; DataError where header length, JSON, dtypes, shapes or
  // offsets are wrong, tensors overlap or leave gaps, or a name comes twice.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // by begin
  // Bytes of the file from `offset`.
  void read(int64_t offset, std::span<std::byte> out) const { file_.read(offset, out); }

 private:
  InputFile file_;
  std::vector<SafetensorsEntry> entries_;
};

// Length and header of a file that holds these tensors one after another, in this order; begin and
// end are set here.
std::string safetensors_header(std::vector<SafetensorsEntry>& entries);

}  // namespace shardrun
