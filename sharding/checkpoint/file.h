// Files of a checkpoint, with every error named and everything synced. Used by this folder and by
// launch/checkpoint/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "runtime/fault.h"

namespace shardrun {

// Closes its descriptor when it goes.
class FileHandle {
 public:
  FileHandle() = default;
  FileHandle(std::filesystem::path path, int descriptor);
  ~FileHandle() { close(); }
  FileHandle(FileHandle&& other) noexcept { swap(other); }
  FileHandle& operator=(FileHandle&& other) noexcept {
    swap(other);
    return *this;
  }
  const std::filesystem::path& path() const { return path_; }
  bool is_open() const { return descriptor_ >= 0; }

 protected:
  int close() noexcept;  // 0, or errno
  void swap(FileHandle& other) noexcept;
  std::filesystem::path path_;
  int descriptor_ = -1;
};

// A new file, written from front to back. IoError with the system's reason.
class OutputFile : public FileHandle {
 public:
  static OutputFile create(const std::filesystem::path& path);  // must not exist
  void write(std::span<const std::byte> bytes);
  int64_t bytes() const { return bytes_; }  // written so far
  void finish();                            // on the disk, closed
  // The next write meets what `kind` names, nospace or short_write, as if the system had answered so.
  void fail_next(FaultKind kind) { fault_ = kind; }

 private:
  using FileHandle::FileHandle;
  int64_t bytes_ = 0, on_their_way_ = 0;  // the disk was told to write these
  FaultKind fault_ = FaultKind::none;
};

class InputFile : public FileHandle {
 public:
  InputFile() = default;
  // NoInputError where it cannot be opened or is no regular file.
  static InputFile open(const std::filesystem::path& path);
  int64_t bytes() const { return bytes_; }
  // All of `out` from `offset`; IoError, or DataError where the file ends before.
  void read(int64_t offset, std::span<std::byte> out) const;
  // The system may begin to read these; what comes of it is no matter.
  void will_need(int64_t offset, int64_t bytes) const noexcept;

 private:
  InputFile(std::filesystem::path path, int descriptor) : FileHandle(std::move(path), descriptor) {}
  int64_t bytes_ = 0;
};

// Makes names inside the folder survive a power cut.
void sync_folder(const std::filesystem::path& path);

// `from` takes the place of `to` in one rename, also where `to` exists; what was there is removed.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to);

// parent/latest becomes a link to `name`, in one rename. Where the file system has no links there is
// none.
void point_latest(const std::filesystem::path& parent, const std::filesystem::path& name);

void remove_tree(const std::filesystem::path& path);  // nothing there is fine

}  // namespace shardrun
