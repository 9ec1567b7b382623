// Memory of the virtual CUDA runtime: poisoned, fenced and registered.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/virtual_cuda/state.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) (static_cast<void>(p), static_cast<void>(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) (static_cast<void>(p), static_cast<void>(n))
#endif

namespace shardrun::virtual_cuda {

namespace {

constexpr size_t kFence = 256;  // bytes before and behind; also the alignment

size_t with_fences(size_t bytes) {
  return kFence + (bytes + kFence - 1) / kFence * kFence + kFence;
}

// NaN as fp32, fp64, bf16 and fp16, and as an index far out.
void poison(std::byte* data, size_t bytes) {
  constexpr uint16_t kNan = 0x7fff;
  for (size_t i = 0; i + 2 <= bytes; i += 2) std::memcpy(data + i, &kNan, 2);
}
bool is_poison(const std::byte* base, size_t at) {
  return base[at] == (at % 2 == 0 ? std::byte{0xff} : std::byte{0x7f});
}

}  // namespace

void* allocate(size_t bytes, int device, MemoryKind kind) {
  const size_t all = with_fences(bytes);
  std::byte* base = static_cast<std::byte*>(std::aligned_alloc(kFence, all));
  if (!base) throw std::bad_alloc();
  poison(base, all);
  ASAN_POISON_MEMORY_REGION(base, kFence);
  ASAN_POISON_MEMORY_REGION(base + kFence + bytes, all - kFence - bytes);
  state().allocations[base + kFence] = {bytes, device, kind};
  if (kind == MemoryKind::device) {
    VirtualDevice& d = *state().devices[static_cast<size_t>(device)];
    d.bytes += bytes;
    d.most_bytes = std::max(d.most_bytes, d.bytes);
  }
  return base + kFence;
}

std::string release(const void* data, MemoryKind kind) {
  const auto at = state().allocations.find(static_cast<const std::byte*>(data));
  if (at == state().allocations.end()) {
    return fmt::format("{} is not where an allocation begins, or was freed already", data);
  }
  const Allocation allocation = at->second;
  if (allocation.kind != kind) {
    return fmt::format("{} is {} memory", data,
                       allocation.kind == MemoryKind::device ? "device" : "pinned host");
  }
  state().allocations.erase(at);
  if (kind == MemoryKind::device) {
    state().devices[static_cast<size_t>(allocation.device)]->bytes -= allocation.bytes;
  }
  std::byte* base = static_cast<std::byte*>(const_cast<void*>(data)) - kFence;
  const size_t all = with_fences(allocation.bytes);
  ASAN_UNPOISON_MEMORY_REGION(base, all);
  std::string wrong;
  for (size_t i = 0; i < all && wrong.empty(); ++i) {
    if (i == kFence) i += allocation.bytes;
    if (i < all && !is_poison(base, i)) {
      wrong = fmt::format("something wrote byte {} of an allocation of {} bytes at {}",
                          static_cast<int64_t>(i) - static_cast<int64_t>(kFence), allocation.bytes,
                          data);
    }
  }
  poison(base, all);
  std::free(base);
  return wrong;
}

const std::pair<const std::byte* const, Allocation>* allocation_at(const void* data, size_t bytes) {
  const std::byte* begin = static_cast<const std::byte*>(data);
  auto& allocations = state().allocations;
  const auto next = allocations.upper_bound(begin + kFence);  // its first fence is past `begin`
  if (next != allocations.begin()) {
    const auto at = std::prev(next);
    if (begin < at->first - kFence + with_fences(at->second.bytes)) return &*at;
  }
  const bool reaches_next = next != allocations.end() && next->first - kFence < begin + bytes;
  return reaches_next ? &*next : nullptr;
}

MemoryKind memory_kind(const void* data) {
  const std::lock_guard lock(state().mutex);
  const auto* at = allocation_at(data, 1);
  return at ? at->second.kind : MemoryKind::unknown;
}

std::string not_reachable(const void* data, size_t bytes) {
  const std::lock_guard lock(state().mutex);
  const auto* at = allocation_at(data, bytes);
  if (!at) return fmt::format("{} is in no allocation of device or pinned memory", data);
  const std::byte* begin = static_cast<const std::byte*>(data);
  if (begin < at->first || begin + bytes > at->first + at->second.bytes) {
    return fmt::format("{} bytes at {} are not all inside the allocation of {} bytes at {}", bytes,
                       data, at->second.bytes, static_cast<const void*>(at->first));
  }
  return "";
}

}  // namespace shardrun::virtual_cuda
