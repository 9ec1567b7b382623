// A file as read-only memory. Used by the token readers; move-only, unmapped at the end.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace shardrun {

class MappedFile {
 public:
  MappedFile() = default;
  // NoInputError where the file is missing, unreadable or a folder. An empty file is an empty span.
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile();
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace shardrun
