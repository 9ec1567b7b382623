#include "tests/virtual_cuda/sites.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

namespace shardrun::virtual_cuda {

namespace {

constexpr const char* kOrders[] = {"cudaStreamWaitEvent",   "cudaEventSynchronize",
                                   "cudaStreamSynchronize", "cudaDeviceSynchronize",
                                   "cudaEventQuery",        "cudaEventRecord"};

struct LeftOut {
  std::string kind, name;  // "kernel" and its file, "host" and the call
  unsigned line = 0;
  std::set<uintptr_t> offsets;
};

struct Wishes {
  const char* list = std::getenv("SHARDRUN_VIRTUAL_CUDA_SITES");
  std::optional<LeftOut> left_out;
  std::mutex mutex;
  std::set<std::string> listed;

  Wishes() {
    const char* text = std::getenv("SHARDRUN_VIRTUAL_CUDA_LEAVE_OUT");
    if (!text) return;
    std::istringstream in(text);
    LeftOut& wish = left_out.emplace();
    in >> wish.kind >> wish.name;
    if (const size_t colon = wish.name.find(':'); colon != std::string::npos) {
      wish.line = static_cast<unsigned>(std::atoi(wish.name.c_str() + colon + 1));
      wish.name.resize(colon);
    }
    for (std::string offset; in >> offset;) {
      wish.offsets.insert(std::strtoull(offset.c_str(), nullptr, 16));
    }
  }
};

Wishes& wishes() {
  static Wishes* const wishes = new Wishes;  // outlives the statics that come by a wait
  return *wishes;
}

// One write: processes share the file.
void append(const std::string& line) {
  Wishes& w = wishes();
  const std::lock_guard lock(w.mutex);
  if (!w.listed.insert(line).second) return;
  const int file = open(w.list, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  const std::string text = line + '\n';
  if (file < 0 || write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    fmt::print(stderr, "virtual CUDA: cannot write {}\n", w.list);
    std::abort();
  }
  close(file);
}

// Return addresses less one, so that they lie in the line that called; of this executable only.
std::vector<uintptr_t> callers() {
  void* frames[48];
  const int count = backtrace(frames, 48);
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(&left_out_of_host), &own);
  std::vector<uintptr_t> offsets;
  for (int i = 0; i < count; ++i) {
    Dl_info info{};
    if (dladdr(frames[i], &info) == 0 || info.dli_fbase != own.dli_fbase) continue;
    offsets.push_back(reinterpret_cast<uintptr_t>(frames[i]) - 1 -
                      reinterpret_cast<uintptr_t>(info.dli_fbase));
  }
  return offsets;
}

std::string executable() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  return {path, static_cast<size_t>(length > 0 ? length : 0)};
}

}  // namespace

void list_site(const Site& site) {
  if (wishes().list) append(fmt::format("kernel {}:{}", site.file, site.line));
}

std::optional<Site> left_out_of_kernels() {
  const auto& wish = wishes().left_out;
  if (!wish || wish->kind != "kernel") return {};
  return Site{wish->name, wish->line};
}

bool left_out_of_host(const char* call) {
  const Wishes& w = wishes();
  const bool may_leave_out = w.left_out && w.left_out->kind == "host" && w.left_out->name == call;
  if (!w.list && !may_leave_out) return false;
  bool orders = false;
  for (const char* name : kOrders) orders = orders || std::string_view(name) == call;
  if (!orders) return false;
  const std::vector<uintptr_t> offsets = callers();
  if (w.list) {
    std::string line = "host " + executable() + " " + call;
    for (uintptr_t offset : offsets) line += fmt::format(" {:x}", offset);
    append(line);
  }
  if (!may_leave_out) return false;
  for (uintptr_t offset : offsets) {
    if (w.left_out->offsets.contains(offset)) return true;
  }
  return false;
}

}  // namespace shardrun::virtual_cuda
