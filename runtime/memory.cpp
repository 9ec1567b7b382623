#include "runtime/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "runtime/memory_planner.h"

#if defined(SHARDRUN_SANITIZED) && defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define SHARDRUN_POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define SHARDRUN_UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define SHARDRUN_POISON(p, n) static_cast<void>(0)
#define SHARDRUN_UNPOISON(p, n) static_cast<void>(0)
#endif

namespace shardrun {

void Buffer::reset() {
  if (memory_) memory_->do_free(*this);
  memory_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(id_, other.id_);
}

Buffer Memory::allocate(size_t bytes, const char* label) {
  return do_allocate((bytes + kAlignment - 1) / kAlignment * kAlignment, label);
}

OwnedTensor allocate_tensor(Memory& memory, Dtype dtype, const Shape& shape, const char* label) {
  OwnedTensor owned;
  owned.buffer =
      memory.allocate(static_cast<size_t>(shape.numel()) * size_of(dtype), label);
  owned.tensor = Tensor(owned.buffer.data(), dtype, shape);
  return owned;
}

static void* aligned_bytes(size_t bytes, const char* what) {
  void* data = std::aligned_alloc(Memory::kAlignment, std::max(bytes, Memory::kAlignment));
  if (!data) {
    throw DeviceError("out of host memory: {} asked for {} bytes; use more ranks, a higher --zero or a "
                      "smaller --micro-batch",
                      what, bytes);
  }
  return data;
}

// ---- heap

namespace {

class HeapMemory : public Memory {
 public:
  ~HeapMemory() override {
    for (auto& [bytes, blocks] : free_) {
      for (void* block : blocks) std::free(block);
    }
  }
  void begin(const char*) override {}
  void end() override {}

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    std::vector<void*>& blocks = free_[bytes];
    void* data = nullptr;
    if (blocks.empty()) {
      data = aligned_bytes(bytes, label);
    } else {
      data = blocks.back();
      blocks.pop_back();
    }
    return Buffer(this, data, bytes, 0);
  }
  void do_free(const Buffer& buffer) override { free_[buffer.bytes()].push_back(buffer.data()); }

  std::map<size_t, std::vector<void*>> free_;
};

}  // namespace

std::unique_ptr<Memory> make_heap_memory() { return std::make_unique<HeapMemory>(); }

// ---- plan

size_t MemoryPlan::arena_bytes() const {
  size_t largest = 0;
  for (const Program& program : programs) largest = std::max(largest, program.arena_bytes);
  return persistent_bytes + largest;
}

const MemoryPlan::Program* MemoryPlan::find(const std::string& name) const {
  for (const Program& program : programs) {
    if (program.name == name) return &program;
  }
  return nullptr;
}

// ---- recording

struct RecordingMemory::State {
  MemoryPlan plan;
  int current = -1;      // program being run
  bool repeats = false;  // it was recorded before: check instead of record
  size_t next = 0;       // allocation of a repeated program
  int64_t event = 0;
  int64_t alive = 0;
};

RecordingMemory::RecordingMemory() : state_(std::make_unique<State>()) {}
RecordingMemory::~RecordingMemory() = default;

void RecordingMemory::begin(const char* program) {
  State& s = *state_;
  SHARDRUN_CHECK(s.current < 0, "program {} begins inside {}", program,
                 s.plan.programs[s.current].name);
  s.next = 0;
  s.event = 0;
  for (size_t i = 0; i < s.plan.programs.size(); ++i) {
    if (s.plan.programs[i].name != program) continue;
    s.current = static_cast<int>(i);
    s.repeats = true;
    return;
  }
  s.current = static_cast<int>(s.plan.programs.size());
  s.repeats = false;
  s.plan.programs.push_back({.name = program, .blocks = {}});
}

void RecordingMemory::end() {
  State& s = *state_;
  SHARDRUN_CHECK(s.current >= 0, "end outside a program");
  const MemoryPlan::Program& program = s.plan.programs[s.current];
  SHARDRUN_CHECK(s.alive == 0, "program {} ends with {} blocks alive", program.name, s.alive);
  SHARDRUN_CHECK(!s.repeats || s.next == program.blocks.size(),
                 "program {} made {} allocations, {} when it ran before", program.name, s.next,
                 program.blocks.size());
  s.current = -1;
}

Buffer RecordingMemory::do_allocate(size_t bytes, const char* label) {
  State& s = *state_;
  MemoryPlan::Block block{.bytes = bytes, .label = label};
  if (s.current < 0) {
    s.plan.persistent.push_back(block);
    return Buffer(this, nullptr, bytes, -1);
  }
  MemoryPlan::Program& program = s.plan.programs[s.current];
  ++s.alive;
  if (s.repeats) {
    SHARDRUN_CHECK(s.next < program.blocks.size() && program.blocks[s.next].bytes == bytes,
                   "program {} departs from its first run at allocation {} ({}, {} bytes)",
                   program.name, s.next, label, bytes);
    return Buffer(this, nullptr, bytes, static_cast<int64_t>(s.next++));
  }
  block.birth = s.event++;
  program.blocks.push_back(block);
  return Buffer(this, nullptr, bytes, static_cast<int64_t>(program.blocks.size()) - 1);
}

void RecordingMemory::do_free(const Buffer& buffer) {
  State& s = *state_;
  if (buffer.id() < 0) return;  // persistent: the rehearsal ends
  SHARDRUN_CHECK(s.current >= 0, "a block of a program was freed outside it");
  --s.alive;
  if (!s.repeats) s.plan.programs[s.current].blocks[buffer.id()].death = s.event++;
}

MemoryPlan RecordingMemory::plan() const {
  MemoryPlan plan = state_->plan;
  plan.persistent_bytes = assign_persistent_offsets(plan.persistent);
  for (MemoryPlan::Program& program : plan.programs) assign_offsets(program);
  return plan;
}

// ---- arena

namespace {

class ArenaMemory : public Memory {
 public:
  explicit ArenaMemory(MemoryPlan plan)
      : plan_(std::move(plan)),
        arena_(static_cast<std::byte*>(aligned_bytes(plan_.arena_bytes(), "the arena"))) {
    SHARDRUN_POISON(arena_, plan_.arena_bytes());
  }
  ~ArenaMemory() override {
    SHARDRUN_UNPOISON(arena_, plan_.arena_bytes());
    std::free(arena_);
  }

  void begin(const char* name) override {
    SHARDRUN_CHECK(program_ == nullptr, "program {} begins inside {}", name, program_->name);
    for (const MemoryPlan::Program& program : plan_.programs) {
      if (program.name == name) program_ = &program;
    }
    SHARDRUN_CHECK(program_ != nullptr, "program {} is not in the plan", name);
    next_ = 0;
    event_ = 0;
    alive_ = 0;
  }

  void end() override {
    SHARDRUN_CHECK(program_ != nullptr, "end outside a program");
    SHARDRUN_CHECK(next_ == program_->blocks.size(), "program {} made {} allocations, planned {}",
                   program_->name, next_, program_->blocks.size());
    SHARDRUN_CHECK(alive_ == 0, "program {} ends with {} blocks alive", program_->name, alive_);
    SHARDRUN_CHECK(departed_.empty(), "program {}: {} was freed earlier or later than planned",
                   program_->name, departed_);
    program_ = nullptr;
  }

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    const bool inside = program_ != nullptr;
    const std::vector<MemoryPlan::Block>& blocks = inside ? program_->blocks : plan_.persistent;
    size_t& next = inside ? next_ : next_persistent_;
    const char* name = inside ? program_->name.c_str() : "persistent memory";
    SHARDRUN_CHECK(next < blocks.size(), "{}: allocation {} ({}, {} bytes), planned only {}", name,
                   next, label, bytes, blocks.size());
    const MemoryPlan::Block& block = blocks[next];
    SHARDRUN_CHECK(block.bytes == bytes && block.label == label,
                   "{}: allocation {} is {} of {} bytes, planned {} of {} bytes", name, next, label,
                   bytes, block.label, block.bytes);
    if (inside) {
      SHARDRUN_CHECK(block.birth == event_, "{}: allocation {} ({}) is event {}, planned {}", name,
                     next, label, event_, block.birth);
      ++event_;
      ++alive_;
    }
    std::byte* data = arena_ + (inside ? plan_.persistent_bytes : 0) + block.offset;
    SHARDRUN_UNPOISON(data, bytes);
    return Buffer(this, data, bytes, inside ? static_cast<int64_t>(next++) : (++next, -1));
  }

  void do_free(const Buffer& buffer) override {
    SHARDRUN_POISON(buffer.data(), buffer.bytes());
    if (buffer.id() < 0 || program_ == nullptr) return;  // persistent, or unwinding after an error
    const MemoryPlan::Block& block = program_->blocks[buffer.id()];
    // Throwing here would end the process: the departure shows at end().
    if (block.death != event_ && departed_.empty()) departed_ = block.label;
    ++event_;
    --alive_;
  }

  MemoryPlan plan_;
  std::byte* arena_;
  const MemoryPlan::Program* program_ = nullptr;
  size_t next_ = 0, next_persistent_ = 0;
  int64_t event_ = 0, alive_ = 0;
  std::string departed_;  // label of a block that was not freed when planned
};

}  // namespace

std::unique_ptr<Memory> make_arena_memory(MemoryPlan plan) {
  return std::make_unique<ArenaMemory>(std::move(plan));
}

}  // namespace shardrun
