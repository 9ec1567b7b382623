// Device memory of one rank. Everything that a step touches is allocated here, under a label, so that
// the same run on the device kind `meta` records who lives when, a planner fixes every offset once,
// and the real run replays the plan and stops where it departs from it.
//
// [Note: programs] Allocations fall into `persistent` ones, made at start and kept, and those inside a
// *program*: one kind of step (micro_step, update, evaluate, ...) between begin(program) and end().
// Every run of a program allocates and frees the same sizes in the same order; everything allocated
// inside is freed before end(). Programs share one stretch of the arena, persistent memory has its own.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/tensor.h"

namespace shardrun {

class Device;
class Memory;

// A move-only owner of bytes from a Memory; frees them when it goes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory* memory, void* data, size_t bytes, int64_t id)
      : memory_(memory), data_(data), bytes_(bytes), id_(id) {}
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));
    swap(taken);  // the old bytes go with `taken`, now
    return *this;
  }
  explicit operator bool() const { return memory_ != nullptr; }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int64_t id() const { return id_; }
  void reset();
  void swap(Buffer& other) noexcept;

 private:
  Memory* memory_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int64_t id_ = 0;  // the Memory's own name for it
};

class Memory {
 public:
  static constexpr size_t kAlignment = 256;  // bytes; sizes are rounded up to it
  virtual ~Memory() = default;

  // `label` is a literal or outlives the Memory; plans print it.
  Buffer allocate(size_t bytes, const char* label);

  virtual void begin(const char* program) = 0;
  virtual void end() = 0;
  // All bytes that it will ever hand out, where they are one piece; empty otherwise.
  virtual std::span<std::byte> whole() const { return {}; }

 private:
  friend class Buffer;
  virtual Buffer do_allocate(size_t bytes, const char* label) = 0;
  virtual void do_free(const Buffer& buffer) = 0;
};

// A Buffer and the tensor over all of it.
struct OwnedTensor {
  Buffer buffer;
  Tensor tensor;
};
OwnedTensor allocate_tensor(Memory& memory, Dtype dtype, const Shape& shape, const char* label);

// Memory without a plan, of the heap or of `device`: tests, tools, the plain runner. Programs are not
// checked. Freed blocks are kept and reused by size.
std::unique_ptr<Memory> make_heap_memory(Device* device = nullptr);

// What one rank will hold, to the byte.
struct MemoryPlan {
  struct Block {
    size_t bytes = 0;   // rounded up
    size_t offset = 0;  // inside the program's stretch, or inside persistent memory
    int64_t birth = 0, death = 0;  // event numbers inside the program; persistent blocks never die
    std::string label;
  };
  struct Program {
    std::string name;
    std::vector<Block> blocks;  // in order of birth
    size_t peak_bytes = 0;      // lower bound: the most that is alive at once
    size_t arena_bytes = 0;     // what the offsets need
    size_t persistent = 0;      // persistent blocks that were there when it first began
  };
  std::vector<Block> persistent;
  size_t persistent_bytes = 0;
  std::vector<Program> programs;

  size_t arena_bytes() const;  // persistent + the largest program
  const Program* find(const std::string& name) const;
};

// Records on `meta`: hands out null pointers.
class RecordingMemory : public Memory {
 public:
  RecordingMemory();
  ~RecordingMemory() override;
  void begin(const char* program) override;  // a program recorded before must repeat exactly
  void end() override;
  MemoryPlan plan() const;  // all offsets fixed

 private:
  struct State;
  std::unique_ptr<State> state_;
  Buffer do_allocate(size_t bytes, const char* label) override;
  void do_free(const Buffer& buffer) override;
};

// One arena of plan.arena_bytes(), of the heap or of `device`, allocated at construction and replayed. A
// departure from the plan (size, label, order, count, free, leak) is an InternalError that names both,
// thrown before the next allocation. In builds with SHARDRUN_SANITIZE dead ranges of host memory are
// poisoned for the address sanitizer.
std::unique_ptr<Memory> make_arena_memory(MemoryPlan plan, Device* device = nullptr);

}  // namespace shardrun
