#include "launch/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/error.h"

namespace shardrun {

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw NoInputError("{}: cannot open: {}", path, std::strerror(errno));
  struct stat status {};
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(file);
    throw NoInputError("{}: is not a regular file", path);
  }
  if (status.st_size > 0) {
    const auto size = static_cast<size_t>(status.st_size);
    void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    const int error = errno;
    if (memory == MAP_FAILED) {
      close(file);
      throw NoInputError("{}: cannot map {} bytes: {}", path, size, std::strerror(error));
    }
    bytes_ = {static_cast<const std::byte*>(memory), size};
  }
  close(file);
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace shardrun
