#include "sharding/checkpoint/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "runtime/error.h"

namespace shardrun {
namespace {

// Linux moves at most 2^31 - 4096 bytes in one call.
constexpr size_t kMostInOneCall = size_t{1} << 30;
constexpr int64_t kWriteBehind = int64_t{8} << 20;

std::string reason(int error) {
  return std::generic_category().message(error);
}

void sync(int descriptor, const std::filesystem::path& path) {
  while (::fsync(descriptor) != 0) {
    if (errno == EINTR) continue;
    // Some network file systems have no fsync of folders; they write names through.
    if (errno == EINVAL || errno == ENOTSUP) return;
    throw IoError("{}: cannot sync to disk: {}", path.string(), reason(errno));
  }
}

}  // namespace

FileHandle::FileHandle(std::filesystem::path path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor) {}

int FileHandle::close() noexcept {
  if (descriptor_ < 0) return 0;
  const int error = ::close(descriptor_) == 0 ? 0 : errno;
  descriptor_ = -1;
  return error;
}

void FileHandle::swap(FileHandle& other) noexcept {
  path_.swap(other.path_);
  std::swap(descriptor_, other.descriptor_);
}

OutputFile OutputFile::create(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) throw IoError("{}: cannot create: {}", path.string(), reason(errno));
  return OutputFile(path, descriptor);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    size_t most = std::min(bytes.size(), kMostInOneCall);
    const FaultKind fault = std::exchange(fault_, FaultKind::none);
    if (fault == FaultKind::short_write) most = (most + 1) / 2;
    const bool full = fault == FaultKind::nospace;
    const ssize_t n = full ? -1 : ::write(descriptor_, bytes.data(), most);
    if (full) errno = ENOSPC;
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      throw IoError("{}: cannot write after {} bytes: {}", path_.string(), bytes_,
                    n < 0 ? reason(errno) : "no progress");
    }
    bytes_ += n;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  // The disk works while we hash: less is left for the sync at the end.
  if (bytes_ - on_their_way_ >= kWriteBehind) {
    ::sync_file_range(descriptor_, on_their_way_, bytes_ - on_their_way_, SYNC_FILE_RANGE_WRITE);
    on_their_way_ = bytes_;
  }
}

void OutputFile::finish() {
  sync(descriptor_, path_);
  if (const int error = close()) {
    throw IoError("{}: cannot close: {}", path_.string(), reason(error));
  }
}

InputFile InputFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: a FIFO under this name must not hang us.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw NoInputError("{}: cannot open: {}", path.string(), reason(errno));
  InputFile file(path, descriptor);
  struct stat status;
  if (::fstat(descriptor, &status) != 0) {
    throw NoInputError("{}: cannot look at it: {}", path.string(), reason(errno));
  }
  if (!S_ISREG(status.st_mode)) throw NoInputError("{}: not a regular file", path.string());
  file.bytes_ = status.st_size;
  return file;
}

void InputFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n =
        ::pread(descriptor_, out.data(), std::min(out.size(), kMostInOneCall), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      throw IoError("{}: cannot read at byte {}: {}", path_.string(), offset, reason(errno));
    }
    if (n == 0) {
      throw DataError("{}: ends at byte {}, wanted {} more", path_.string(), offset, out.size());
    }
    offset += n;
    out = out.subspan(static_cast<size_t>(n));
  }
}

void InputFile::will_need(int64_t offset, int64_t bytes) const noexcept {
  ::posix_fadvise(descriptor_, offset, bytes, POSIX_FADV_WILLNEED);
}

void sync_folder(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw IoError("{}: cannot open: {}", path.string(), reason(errno));
  const FileHandle folder(path, descriptor);
  sync(descriptor, path);
}

void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code error;
  const bool replaces = std::filesystem::exists(std::filesystem::symlink_status(to, error));
  if (replaces) {
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
      sync_folder(to.parent_path());
      std::filesystem::remove_all(from, error);  // the new one stands, whatever becomes of the old
      return;
    }
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
      throw IoError("{}: cannot put in place of {}: {}", from.string(), to.string(), reason(errno));
    }
  }
  std::filesystem::path aside = from;
  aside += ".old";
  if (replaces) {
    remove_tree(aside);
    if (::rename(to.c_str(), aside.c_str()) != 0) {
      throw IoError("{}: cannot move aside: {}", to.string(), reason(errno));
    }
  }
  if (::rename(from.c_str(), to.c_str()) != 0) {
    const int cause = errno;
    if (replaces) ::rename(aside.c_str(), to.c_str());
    throw IoError("{}: cannot rename to {}: {}", from.string(), to.string(), reason(cause));
  }
  sync_folder(to.parent_path());
  if (replaces) std::filesystem::remove_all(aside, error);
}

void point_latest(const std::filesystem::path& parent, const std::filesystem::path& name) {
  const std::filesystem::path link = parent / "latest", fresh = parent / ".latest.tmp";
  ::unlink(fresh.c_str());
  if (::symlink(name.c_str(), fresh.c_str()) != 0) return;
  if (::rename(fresh.c_str(), link.c_str()) != 0) {
    const int cause = errno;
    ::unlink(fresh.c_str());
    throw IoError("{}: cannot replace: {}", link.string(), reason(cause));
  }
  sync_folder(parent);
}

void remove_tree(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) throw IoError("{}: cannot remove: {}", path.string(), error.message());
}

}  // namespace shardrun
