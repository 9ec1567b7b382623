// Token files for tests, byte by byte.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace shardrun {

class TempDir {
 public:
  explicit TempDir(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("shardrun_{}_{}", name, getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return *this / name;
  }

 private:
  std::filesystem::path path_;
};

template <typename T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::string llmc_header(int32_t version, int32_t count) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = version;
  header[2] = count;
  return raw(header);
}

inline std::string megatron_index(uint8_t code, const std::vector<int32_t>& lengths,
                                  const std::vector<int64_t>& offsets,
                                  const std::vector<int64_t>& documents) {
  return std::string("MMIDIDX\0\0", 9) + raw<uint64_t>({1}) + raw<uint8_t>({code}) +
         raw<uint64_t>({lengths.size()}) + raw<uint64_t>({documents.size()}) + raw(lengths) +
         raw(offsets) + raw(documents);
}

}  // namespace shardrun
