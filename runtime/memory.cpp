#include "runtime/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "runtime/device.h"
#include "runtime/memory_planner.h"

#if defined(SHARDRUN_SANITIZED) && defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define SHARDRUN_POISON(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define SHARDRUN_UNPOISON(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
#define SHARDRUN_POISON(p, n) (static_cast<void>(p), static_cast<void>(n))
#define SHARDRUN_UNPOISON(p, n) (static_cast<void>(p), static_cast<void>(n))
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

// Where bytes come from: the heap, or a GPU.
class Source {
 public:
  explicit Source(Device* device) : device_(device) {}

  void* allocate(size_t bytes, const char* what) const {
    bytes = std::max(bytes, Memory::kAlignment);
    if (device_) return device_->allocate(bytes, what);
    void* data = std::aligned_alloc(Memory::kAlignment, bytes);
    if (!data) {
      throw DeviceError("out of host memory: {} asked for {} bytes; use more ranks, a higher --zero "
                        "or a smaller --micro-batch",
                        what, bytes);
    }
    return data;
  }

  void free(void* data) const {
    if (device_) {
      device_->free(data);
    } else {
      std::free(data);
    }
  }

  // Nobody may touch the range until revive(). Only the heap can be watched.
  void poison(void* data, size_t bytes) const {
    if (!device_) SHARDRUN_POISON(data, bytes);
  }
  void revive(void* data, size_t bytes) const {
    if (!device_) SHARDRUN_UNPOISON(data, bytes);
  }

 private:
  Device* device_;
};

// ---- heap

namespace {

class HeapMemory : public Memory {
 public:
  explicit HeapMemory(Device* device) : source_(device) {}
  ~HeapMemory() override {
    for (auto& [bytes, blocks] : free_) {
      for (void* block : blocks) source_.free(block);
    }
  }
  void begin(const char*) override {}
  void end() override {}

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    std::vector<void*>& blocks = free_[bytes];
    void* data = nullptr;
    if (blocks.empty()) {
      data = source_.allocate(bytes, label);
    } else {
      data = blocks.back();
      blocks.pop_back();
    }
    return Buffer(this, data, bytes, 0);
  }
  void do_free(const Buffer& buffer) override { free_[buffer.bytes()].push_back(buffer.data()); }

  Source source_;
  std::map<size_t, std::vector<void*>> free_;
};

}  // namespace

std::unique_ptr<Memory> make_heap_memory(Device* device) {
  return std::make_unique<HeapMemory>(device);
}

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

// ---- replay

namespace {

// Holds one run of a program to the blocks that were planned: sizes, labels, order, frees.
// Allocates nothing once it has room for the largest program.
class Replay {
 public:
  void make_room(size_t blocks) { alive_.reserve(blocks); }
  bool runs() const { return program_ != nullptr; }
  const MemoryPlan::Program& program() const { return *program_; }

  void begin(const MemoryPlan::Program& program) {
    program_ = &program;
    alive_.assign(program.blocks.size(), false);
    next_ = 0;
    event_ = 0;
    departed_ = nullptr;
  }

  const MemoryPlan::Block& allocate(size_t bytes, const char* label) {
    check_frees();  // before memory of a block that is still alive is handed out
    const auto& blocks = program_->blocks;
    SHARDRUN_CHECK(next_ < blocks.size(),
                   "program {}: allocation {} is {} of {} bytes, planned only {}", program_->name,
                   next_, label, bytes, blocks.size());
    const MemoryPlan::Block& block = blocks[next_];
    SHARDRUN_CHECK(block.bytes == bytes && block.label == label,
                   "program {}: allocation {} is {} of {} bytes, planned {} of {} bytes",
                   program_->name, next_, label, bytes, block.label, block.bytes);
    SHARDRUN_CHECK(block.birth == event_,
                   "program {}: allocation {} ({}) finds {} alive, planned to be freed before",
                   program_->name, next_, label, overdue(block));
    ++event_;
    alive_[next_++] = true;
    return block;
  }

  int64_t last() const { return static_cast<int64_t>(next_) - 1; }

  void free(int64_t number) {
    const MemoryPlan::Block& block = program_->blocks[number];
    // Throwing here would end the process: the next allocation or the end does.
    if (block.death != event_ && !departed_) {
      departed_ = &block;
      departed_at_ = event_;
    }
    ++event_;
    alive_[number] = false;
  }

  void end() {
    check_frees();
    const auto& blocks = program_->blocks;
    const auto leak = std::find(alive_.begin(), alive_.end(), true);
    SHARDRUN_CHECK(leak == alive_.end(),
                   "program {} ends with {} alive, planned to be freed before", program_->name,
                   blocks[leak - alive_.begin()].label);
    SHARDRUN_CHECK(next_ == blocks.size(),
                   "program {} made {} allocations, planned {}: {} is missing", program_->name,
                   next_, blocks.size(), blocks[next_].label);
    program_ = nullptr;
  }

 private:
  void check_frees() const {
    SHARDRUN_CHECK(!departed_, "program {}: {} was freed at event {}, planned {}", program_->name,
                   departed_->label, departed_at_, departed_->death);
  }
  // All frees so far came when planned, so an allocation is early because one did not come.
  const std::string& overdue(const MemoryPlan::Block& next) const {
    size_t i = 0;
    while (!alive_[i] || program_->blocks[i].death > next.birth) ++i;
    return program_->blocks[i].label;
  }

  const MemoryPlan::Program* program_ = nullptr;
  std::vector<bool> alive_;
  size_t next_ = 0;
  int64_t event_ = 0, departed_at_ = 0;
  const MemoryPlan::Block* departed_ = nullptr;  // the first that was not freed when planned
};

}  // namespace

// ---- recording

struct RecordingMemory::State {
  MemoryPlan plan;
  int recording = -1;  // program that runs for the first time
  Replay replay;       // of one that ran before
  int64_t event = 0;
};

RecordingMemory::RecordingMemory() : state_(std::make_unique<State>()) {}
RecordingMemory::~RecordingMemory() = default;

void RecordingMemory::begin(const char* name) {
  State& s = *state_;
  SHARDRUN_CHECK(!s.replay.runs() && s.recording < 0, "program {} begins inside {}", name,
                 s.replay.runs() ? s.replay.program().name : s.plan.programs[s.recording].name);
  if (const MemoryPlan::Program* known = s.plan.find(name)) return s.replay.begin(*known);
  s.recording = static_cast<int>(s.plan.programs.size());
  s.event = 0;
  s.plan.programs.push_back(
      {.name = name, .blocks = {}, .persistent = s.plan.persistent.size()});
}

void RecordingMemory::end() {
  State& s = *state_;
  if (s.replay.runs()) return s.replay.end();
  SHARDRUN_CHECK(s.recording >= 0, "end outside a program");
  const MemoryPlan::Program& program = s.plan.programs[s.recording];
  for (const MemoryPlan::Block& block : program.blocks) {
    SHARDRUN_CHECK(block.death > 0, "program {} ends with {} alive, all must be freed before",
                   program.name, block.label);
  }
  s.recording = -1;
}

Buffer RecordingMemory::do_allocate(size_t bytes, const char* label) {
  State& s = *state_;
  if (s.replay.runs()) {
    s.replay.allocate(bytes, label);
    return Buffer(this, nullptr, bytes, s.replay.last());
  }
  const bool inside = s.recording >= 0;
  std::vector<MemoryPlan::Block>& blocks =
      inside ? s.plan.programs[s.recording].blocks : s.plan.persistent;
  blocks.push_back({.bytes = bytes, .label = label});
  if (!inside) return Buffer(this, nullptr, bytes, -1);
  blocks.back().birth = s.event++;
  return Buffer(this, nullptr, bytes, static_cast<int64_t>(blocks.size()) - 1);
}

void RecordingMemory::do_free(const Buffer& buffer) {
  State& s = *state_;
  if (buffer.id() < 0) return;  // persistent: the rehearsal ends
  if (s.replay.runs()) return s.replay.free(buffer.id());
  if (s.recording >= 0) s.plan.programs[s.recording].blocks[buffer.id()].death = s.event++;
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
  ArenaMemory(MemoryPlan plan, Device* device)
      : source_(device),
        plan_(std::move(plan)),
        arena_(static_cast<std::byte*>(source_.allocate(plan_.arena_bytes(), "the arena"))) {
    for (const auto& program : plan_.programs) replay_.make_room(program.blocks.size());
    source_.poison(arena_, plan_.arena_bytes());
  }
  ~ArenaMemory() override {
    source_.revive(arena_, plan_.arena_bytes());
    source_.free(arena_);
  }

  void begin(const char* name) override {
    SHARDRUN_CHECK(!replay_.runs(), "program {} begins inside {}", name, replay_.program().name);
    const MemoryPlan::Program* program = plan_.find(name);
    SHARDRUN_CHECK(program != nullptr, "program {} is not in the plan", name);
    SHARDRUN_CHECK(next_persistent_ >= program->persistent,
                   "program {} begins after {} persistent allocations, planned {}", name,
                   next_persistent_, program->persistent);
    replay_.begin(*program);
  }

  void end() override {
    SHARDRUN_CHECK(replay_.runs(), "end outside a program");
    replay_.end();
  }

  std::span<std::byte> whole() const override { return {arena_, plan_.arena_bytes()}; }

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    const bool inside = replay_.runs();
    const MemoryPlan::Block& block =
        inside ? replay_.allocate(bytes, label) : next_persistent(bytes, label);
    std::byte* data = arena_ + (inside ? plan_.persistent_bytes : 0) + block.offset;
    source_.revive(data, bytes);
    return Buffer(this, data, bytes, inside ? replay_.last() : -1);
  }

  void do_free(const Buffer& buffer) override {
    source_.poison(buffer.data(), buffer.bytes());
    // Neither for persistent memory, nor while an error outside a program unwinds.
    if (buffer.id() >= 0 && replay_.runs()) replay_.free(buffer.id());
  }

  const MemoryPlan::Block& next_persistent(size_t bytes, const char* label) {
    const auto& blocks = plan_.persistent;
    const size_t next = next_persistent_;
    SHARDRUN_CHECK(next < blocks.size(),
                   "persistent memory: allocation {} is {} of {} bytes, planned only {}", next,
                   label, bytes, blocks.size());
    const MemoryPlan::Block& block = blocks[next];
    SHARDRUN_CHECK(block.bytes == bytes && block.label == label,
                   "persistent memory: allocation {} is {} of {} bytes, planned {} of {} bytes",
                   next, label, bytes, block.label, block.bytes);
    ++next_persistent_;
    return block;
  }

  Source source_;
  MemoryPlan plan_;
  std::byte* arena_;
  Replay replay_;
  size_t next_persistent_ = 0;
};

}  // namespace

std::unique_ptr<Memory> make_arena_memory(MemoryPlan plan, Device* device) {
  return std::make_unique<ArenaMemory>(std::move(plan), device);
}

}  // namespace shardrun
