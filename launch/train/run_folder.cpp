#include "launch/train/run_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include "launch/ranks.h"

namespace shardrun {
namespace {

struct Holder {
  std::string run, host;
  int64_t process = 0, started = 0;
};

// When the process began, in the kernel's ticks; 0 where there is none.
int64_t start_of(int64_t process) {
  std::ifstream in(fmt::format("/proc/{}/stat", process));
  std::string text;
  std::getline(in, text);
  const size_t name_end = text.rfind(')');  // a name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int i = 0; i < 19; ++i) fields >> field;
  int64_t started = 0;
  fields >> started;
  return started;
}

Holder read_holder(int descriptor) {
  char text[1024];
  const ssize_t n = ::pread(descriptor, text, sizeof(text), 0);
  std::istringstream in(std::string(text, static_cast<size_t>(std::max<ssize_t>(n, 0))));
  Holder holder;
  std::string key, value;
  while (in >> key >> value) {
    if (key == "run") holder.run = value;
    if (key == "host") holder.host = value;
    if (key == "process") holder.process = std::atoll(value.c_str());
    if (key == "started") holder.started = std::atoll(value.c_str());
  }
  return holder;
}

std::string new_run() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace

RunFolder::RunFolder(std::filesystem::path out, bool locks)
    : path_(std::move(out) / "run"), locks_(locks) {}

RunFolder::~RunFolder() {
  if (descriptor_ < 0) return;
  if (signed_) {  // who reads it later need not ask whether we live
    const std::string text = fmt::format("run {}\n", run_);
    if (::pwrite(descriptor_, text.data(), text.size(), 0) < 0 ||
        ::ftruncate(descriptor_, static_cast<off_t>(text.size())) != 0) {
      // It stays as it was: a process that is gone.
    }
  }
  ::close(descriptor_);
}

void RunFolder::lock(bool create) {
  if (descriptor_ >= 0) return;
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0666);
  if (descriptor_ < 0) {
    if (!create) return;
    throw CannotCreateError("{}: cannot open: {}", path_.string(), std::strerror(errno));
  }
  const bool locked = locks_ && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
  const bool taken = locks_ && !locked && errno == EWOULDBLOCK;
  const Holder holder = read_holder(descriptor_);
  if (locked || (!taken && holder.process == 0)) {
    run_ = holder.run;
    return;
  }
  const bool here = holder.host == host_name();
  if (!taken && here && start_of(holder.process) != holder.started) {
    run_ = holder.run;
    return;
  }
  ::close(std::exchange(descriptor_, -1));
  throw CannotCreateError(
      "{}: another job writes here: process {} on {}{}", path_.parent_path().string(),
      holder.process, holder.host.empty() ? "a host that has not signed yet" : holder.host,
      taken || here
          ? "; wait for its end, or choose another --out"
          : "; this file system has no locks: if that job is gone, remove " + path_.string());
}

void RunFolder::hold() {
  lock(false);
}

void RunFolder::sign(bool goes_on) {
  lock(true);
  if (run_.empty() || !goes_on) run_ = new_run();
  const std::string text = fmt::format("run {}\nhost {}\nprocess {}\nstarted {}\n", run_,
                                       host_name(), ::getpid(), start_of(::getpid()));
  const ssize_t n = ::pwrite(descriptor_, text.data(), text.size(), 0);
  if (n != static_cast<ssize_t>(text.size()) ||
      ::ftruncate(descriptor_, static_cast<off_t>(text.size())) != 0) {
    throw CannotCreateError("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
  signed_ = true;
}

}  // namespace shardrun
