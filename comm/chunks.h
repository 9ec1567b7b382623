// What transports share: cutting a long message, staging, waiting.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "runtime/memory.h"

namespace shardrun {

// body(offset, count) over [0, total) in pieces of at most `limit`.
template <typename Body>
void for_each_chunk(size_t total, size_t limit, Body&& body) {
  for (size_t offset = 0; offset < total; offset += limit) {
    body(offset, std::min(limit, total - offset));
  }
}

// Ranks may exceed cores: after some quick looks let others run, then sleep longer and longer, but
// never so long that a message which needs this rank's hand stands still.
inline void back_off(int64_t tries) {
  constexpr int64_t kLooks = 64, kYields = 512, kLongest = 8;
  if (tries < kLooks) return;
  if (tries < kLooks + kYields) {
    std::this_thread::yield();
    return;
  }
  const int64_t sleeps = tries - kLooks - kYields;
  std::this_thread::sleep_for(std::chrono::microseconds(25) * std::min(kLongest, 1 + sleeps / 64));
}

constexpr const char* kStagingLabel = "exchange staging";

// Staging of an exchange over messages: one slot for each rank but this one, whose slice is folded
// where it lies. The size does not depend on who sends: every micro-step, the last one with idle
// ranks too, allocates the same. Slots are aligned like allocations.
struct Staging {
  Staging(int world_size, size_t slice_bytes)
      : slots(world_size - 1),
        slot_bytes((slice_bytes + Memory::kAlignment - 1) / Memory::kAlignment *
                   Memory::kAlignment) {}
  size_t bytes() const { return static_cast<size_t>(slots) * slot_bytes; }
  static int slot_of(int source, int rank) { return source - (source > rank ? 1 : 0); }
  // An empty exchange allocates nothing.
  Buffer allocate(Memory& memory) const {
    return bytes() == 0 ? Buffer() : memory.allocate(bytes(), kStagingLabel);
  }

  int slots;
  size_t slot_bytes;
};

// Where a transport that adds in 16 bits leaves the sum, before it is widened.
inline OwnedTensor allocate_narrow_sum(Memory& memory, Dtype wire, int64_t count) {
  return allocate_tensor(memory, wire, Shape{count}, "16-bit sum");
}

}  // namespace shardrun
