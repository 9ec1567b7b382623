// Device memory: what is recorded is replayed, every departure is named, planned blocks never
// collide.
#include "runtime/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "runtime/memory_planner.h"

namespace shardrun {
namespace {

using Block = MemoryPlan::Block;
using Program = MemoryPlan::Program;

// ---- buffers

// Writes down what happens.
class LoggingMemory : public Memory {
 public:
  void begin(const char*) override {}
  void end() override {}
  std::vector<std::string> log;

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    log.push_back(fmt::format("+{} {}", label, bytes));
    labels_.push_back(label);
    return Buffer(this, nullptr, bytes, static_cast<int64_t>(labels_.size()) - 1);
  }
  void do_free(const Buffer& buffer) override {
    log.push_back(fmt::format("-{}", labels_[buffer.id()]));
  }
  std::vector<const char*> labels_;
};

using Log = std::vector<std::string>;

TEST(Buffer, MovesFreeAtOnce) {
  LoggingMemory memory;
  {
    Buffer a = memory.allocate(1, "a");
    Buffer b = memory.allocate(256, "b");
    EXPECT_TRUE(a);
    a = std::move(b);
    EXPECT_EQ(memory.log.back(), "-a") << "the overwritten block waits";
    EXPECT_EQ(a.bytes(), 256u);
    EXPECT_FALSE(b);  // NOLINT: a moved-from Buffer is empty
    a = memory.allocate(257, "c");
    EXPECT_EQ(memory.log, (Log{"+a 256", "+b 256", "-a", "+c 512", "-b"}));
    Buffer& same = a;
    a = std::move(same);
    EXPECT_TRUE(a) << "moved to itself and gone";
    const Buffer d(std::move(a));
    EXPECT_FALSE(a);  // NOLINT
    EXPECT_EQ(memory.log.size(), 5u);
  }
  EXPECT_EQ(memory.log.back(), "-c");
  EXPECT_EQ(memory.log.size(), 6u) << "freed twice";
}

TEST(Buffer, ResetFreesOnce) {
  LoggingMemory memory;
  Buffer a = memory.allocate(0, "nothing");
  EXPECT_TRUE(a) << "a block without bytes is a block";
  a.reset();
  a.reset();
  EXPECT_FALSE(a);
  EXPECT_EQ(memory.log, (Log{"+nothing 0", "-nothing"}));
}

TEST(HeapMemory, BlocksAreAlignedAndReused) {
  const auto memory = make_heap_memory();
  void* first = nullptr;
  {
    Buffer a = memory->allocate(1000, "a"), b = memory->allocate(1000, "b");
    for (const Buffer* buffer : {&a, &b}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % Memory::kAlignment, 0u);
      EXPECT_EQ(buffer->bytes(), 1024u);
      std::memset(buffer->data(), 1, buffer->bytes());
    }
    EXPECT_NE(a.data(), b.data());
    first = a.data();
  }
  EXPECT_EQ(memory->allocate(1024, "c").data(), first);
  const Buffer empty = memory->allocate(0, "empty");
  EXPECT_TRUE(empty);
  const OwnedTensor owned = allocate_tensor(*memory, Dtype::bf16, {3, 5}, "tensor");
  EXPECT_EQ(owned.tensor.data(), owned.buffer.data());
  EXPECT_EQ(owned.tensor.bytes(), 30u);
  EXPECT_EQ(owned.buffer.bytes(), 256u);
}

// ---- record and replay

// One run of a program, as text: "+a 100" allocates, "-a" frees.
void run_program(Memory& memory, const char* name, const std::vector<std::string>& events) {
  static const std::vector<std::string> kLabels = {"a", "b", "c", "d", "e"};  // outlive the Memory
  std::map<std::string, Buffer> living;
  memory.begin(name);
  for (const std::string& event : events) {
    const std::string label = event.substr(1, 1);
    if (event[0] == '-') {
      living[label].reset();
      continue;
    }
    const auto known = std::find(kLabels.begin(), kLabels.end(), label);
    living[label] = memory.allocate(std::stoul(event.substr(3)), known->c_str());
    if (living[label].data()) std::memset(living[label].data(), 7, living[label].bytes());
  }
  memory.end();
}

const std::vector<std::string> kStep = {"+a 100", "+b 5000", "-b", "+c 3000", "-a", "-c"};
const std::vector<std::string> kEvaluate = {"+d 700", "+e 0", "-e", "-d"};

struct Persistent {
  Buffer weights, moments;
  explicit Persistent(Memory& memory)
      : weights(memory.allocate(1000, "weights")), moments(memory.allocate(256, "moments")) {}
};

MemoryPlan record() {
  RecordingMemory recorder;
  const Persistent persistent(recorder);
  EXPECT_TRUE(persistent.weights);
  EXPECT_EQ(persistent.weights.data(), nullptr);
  run_program(recorder, "step", kStep);
  run_program(recorder, "evaluate", kEvaluate);
  run_program(recorder, "step", kStep);
  return recorder.plan();
}

TEST(RecordingMemory, SaysWhoLivesWhen) {
  const MemoryPlan plan = record();
  ASSERT_EQ(plan.persistent.size(), 2u);
  EXPECT_EQ(plan.persistent[0].label, "weights");
  EXPECT_EQ(plan.persistent[0].bytes, 1024u);
  EXPECT_EQ(plan.persistent[1].offset, 1024u);
  EXPECT_EQ(plan.persistent_bytes, 1280u);

  ASSERT_EQ(plan.programs.size(), 2u) << "a repetition is no program of its own";
  const Program& step = plan.programs[0];
  EXPECT_EQ(plan.find("step"), &step);
  EXPECT_EQ(plan.find("steps"), nullptr);
  ASSERT_EQ(step.blocks.size(), 3u);
  const struct {
    const char* label;
    size_t bytes;
    int64_t birth, death;
  } kWant[] = {{"a", 256, 0, 4}, {"b", 5120, 1, 2}, {"c", 3072, 3, 5}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(step.blocks[i].label, kWant[i].label);
    EXPECT_EQ(step.blocks[i].bytes, kWant[i].bytes);
    EXPECT_EQ(step.blocks[i].birth, kWant[i].birth);
    EXPECT_EQ(step.blocks[i].death, kWant[i].death);
  }
  EXPECT_EQ(step.peak_bytes, 256u + 5120);
  EXPECT_EQ(step.arena_bytes, 256u + 5120);
  EXPECT_EQ(plan.programs[1].peak_bytes, 768u);
  EXPECT_EQ(plan.arena_bytes(), 1280u + 256 + 5120);
}

TEST(ArenaMemory, ReplaysThePlan) {
  const MemoryPlan plan = record();
  const auto memory = make_arena_memory(plan);
  const Persistent persistent(*memory);
  std::memset(persistent.weights.data(), 1, persistent.weights.bytes());
  std::memset(persistent.moments.data(), 2, persistent.moments.bytes());
  // Any order of programs, any number of times.
  for (int i = 0; i < 3; ++i) {
    run_program(*memory, "evaluate", kEvaluate);
    run_program(*memory, "step", kStep);
    run_program(*memory, "step", kStep);
  }
  const auto* start = static_cast<const std::byte*>(persistent.weights.data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(start) % Memory::kAlignment, 0u);
  for (size_t i = 0; i < 1280; ++i) {
    ASSERT_EQ(start[i], std::byte(i < 1024 ? 1 : 2)) << "a program wrote into persistent memory";
  }
  memory->begin("step");
  Buffer a = memory->allocate(100, "a");
  EXPECT_EQ(static_cast<std::byte*>(a.data()), start + 1280 + plan.programs[0].blocks[0].offset);
}

struct Departure {
  const char* what;
  std::vector<std::string> events;    // instead of kStep
  std::vector<std::string> mentions;  // what happened, and what was planned
};

const Departure kDepartures[] = {
    {"Size", {"+a 100", "+b 6000"}, {"b", "6144", "5120"}},
    {"Label", {"+a 100", "+d 5000"}, {" d ", " b "}},
    {"Order", {"+b 5000", "+a 100"}, {"b of 5120", "a of 256"}},
    {"TooMany", {"+a 100", "+b 5000", "-b", "+c 3000", "-a", "-c", "+d 50"}, {" d ", "only 3"}},
    {"TooFew", {"+a 100", "+b 5000", "-b", "-a"}, {"a was freed", "event 3", "planned 4"}},
    {"NoneLeft", {"+a 100", "+b 5000", "-b"}, {"a alive", "planned"}},
    {"Leak", {"+a 100", "+b 5000", "-b", "+c 3000", "-a"}, {"c alive", "planned"}},
    {"FreedEarly", {"+a 100", "+b 5000", "-a", "+c 3000"}, {"a was freed", "event 2", "planned 4"}},
    {"FreedLate", {"+a 100", "+b 5000", "+c 3000"}, {"(c)", "b alive", "planned"}},
    {"FreedInAnotherOrder",
     {"+a 100", "+b 5000", "-b", "+c 3000", "-c", "-a"},
     {"c was freed", "event 4", "planned 5"}},
};

void expect_departure(Memory& memory, const Departure& departure) {
  SCOPED_TRACE(departure.what);
  try {
    run_program(memory, "step", departure.events);
    ADD_FAILURE() << "not noticed";
  } catch (const InternalError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("program step"), std::string::npos) << what;
    for (const std::string& mention : departure.mentions) {
      EXPECT_NE(what.find(mention), std::string::npos) << "no '" << mention << "' in: " << what;
    }
  }
}

// Memory of a block that went at another time than planned may be the next one's, too.
TEST(ArenaMemory, StopsBeforeMemoryIsHandedOutTwice) {
  const auto memory = make_arena_memory(record());
  const Persistent persistent(*memory);
  memory->begin("step");
  Buffer a = memory->allocate(100, "a"), b = memory->allocate(5000, "b");
  a.reset();
  EXPECT_THROW(memory->allocate(3000, "c"), InternalError);
}

TEST(Memory, AMissingAllocationIsNamed) {
  const std::vector<std::string> first = {"+a 1", "-a", "+b 1", "-b"};
  RecordingMemory recorder;
  run_program(recorder, "step", first);
  const auto arena = make_arena_memory(recorder.plan());
  run_program(*arena, "step", first);
  const Departure departure = {"Missing", {"+a 1", "-a"}, {"1 allocations", "planned 2", "b is"}};
  expect_departure(*arena, departure);
  expect_departure(recorder, departure);
}

TEST(ArenaMemory, DeparturesAreNamed) {
  const MemoryPlan plan = record();
  for (const Departure& departure : kDepartures) {
    const auto memory = make_arena_memory(plan);
    const Persistent persistent(*memory);
    run_program(*memory, "step", kStep);
    expect_departure(*memory, departure);
  }
}

// The rehearsal runs every program twice where the real run does: it, too, must repeat.
TEST(RecordingMemory, DeparturesFromTheFirstRunAreNamed) {
  for (const Departure& departure : kDepartures) {
    RecordingMemory memory;
    run_program(memory, "step", kStep);
    expect_departure(memory, departure);
  }
}

TEST(RecordingMemory, ALeakOfTheFirstRunIsNamed) {
  RecordingMemory memory;
  expect_departure(memory, {"leak", {"+a 1", "+b 1", "-a"}, {"b alive"}});
}

TEST(ArenaMemory, PersistentDeparturesAreNamed) {
  const MemoryPlan plan = record();
  const std::pair<std::function<void(Memory&)>, std::vector<std::string>> kCases[] = {
      {[](Memory& m) { m.allocate(1025, "weights"); }, {"weights", "1280", "1024"}},
      {[](Memory& m) { m.allocate(1000, "moments"); }, {"moments", "weights"}},
      {[](Memory& m) {
         const Persistent persistent(m);
         m.allocate(1, "more");
       },
       {"more", "only 2"}},
      {[](Memory& m) { m.begin("step"); }, {"step", "0 persistent", "planned"}},
  };
  for (const auto& [run, mentions] : kCases) {
    const auto memory = make_arena_memory(plan);
    try {
      run(*memory);
      ADD_FAILURE() << "not noticed: " << mentions[0];
    } catch (const InternalError& error) {
      const std::string what = error.what();
      for (const std::string& mention : mentions) {
        EXPECT_NE(what.find(mention), std::string::npos) << "no '" << mention << "' in: " << what;
      }
    }
  }
}

TEST(Memory, ProgramsDoNotNestAndMustBeKnown) {
  const auto arena = make_arena_memory(record());
  const Persistent persistent(*arena);
  RecordingMemory recorder;
  EXPECT_THROW(arena->begin("predict"), InternalError) << "not in the plan";
  for (Memory* memory : {arena.get(), static_cast<Memory*>(&recorder)}) {
    EXPECT_THROW(memory->end(), InternalError);
    memory->begin("step");
    try {
      memory->begin("evaluate");
      ADD_FAILURE() << "nested";
    } catch (const InternalError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("evaluate begins inside step"), std::string::npos) << what;
    }
  }
}

TEST(Memory, NothingAtAllIsLegal) {
  RecordingMemory recorder;
  { const Buffer nothing = recorder.allocate(0, "nothing"); }
  run_program(recorder, "step", {"+a 0", "+b 0", "-a", "-b"});
  run_program(recorder, "empty", {});
  const MemoryPlan plan = recorder.plan();
  EXPECT_EQ(plan.arena_bytes(), 0u);
  const auto memory = make_arena_memory(plan);
  const Buffer nothing = memory->allocate(0, "nothing");
  EXPECT_TRUE(nothing);
  EXPECT_NE(nothing.data(), nullptr);
  run_program(*memory, "step", {"+a 0", "+b 0", "-a", "-b"});
  run_program(*memory, "empty", {});
}

// ---- planner

bool together(const Block& a, const Block& b) { return a.birth < b.death && b.birth < a.death; }

// Planned at all, and soundly.
void expect_sound(const Program& program) {
  const std::vector<Block>& blocks = program.blocks;
  size_t sum = 0, peak = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    sum += blocks[i].bytes;
    ASSERT_LE(blocks[i].offset + blocks[i].bytes, program.arena_bytes);
    ASSERT_EQ(blocks[i].offset % Memory::kAlignment, 0u);
    size_t alive = 0;  // when block i comes
    for (size_t j = 0; j < blocks.size(); ++j) {
      const bool lives = blocks[j].birth <= blocks[i].birth && blocks[i].birth < blocks[j].death;
      alive += lives ? blocks[j].bytes : 0;
      if (j <= i || !together(blocks[i], blocks[j])) continue;
      if (blocks[i].bytes == 0 || blocks[j].bytes == 0) continue;
      ASSERT_TRUE(blocks[i].offset + blocks[i].bytes <= blocks[j].offset ||
                  blocks[j].offset + blocks[j].bytes <= blocks[i].offset)
          << blocks[i].label << " and " << blocks[j].label << " collide";
    }
    peak = std::max(peak, alive);
  }
  EXPECT_EQ(program.peak_bytes, peak);
  EXPECT_GE(program.arena_bytes, program.peak_bytes);
  EXPECT_LE(program.arena_bytes, sum);
}

// Blocks from a random story; `last_in_first_out` frees like nested calls do.
Program random_program(uint32_t seed, bool last_in_first_out) {
  std::mt19937 engine(seed);
  const auto draw = [&](uint32_t below) { return engine() % below; };
  const uint32_t count = 1 + draw(80);
  Program program{.name = "random", .blocks = {}};
  std::vector<size_t> alive;
  int64_t event = 0;
  while (program.blocks.size() < count || !alive.empty()) {
    if (program.blocks.size() < count && (alive.empty() || draw(100) < 55)) {
      const size_t size = draw(10) == 0 ? 0 : 256 * (1 + draw(draw(5) == 0 ? 1000 : 20));
      alive.push_back(program.blocks.size());
      program.blocks.push_back({.bytes = size,
                                .birth = event++,
                                .label = fmt::format("block {}", program.blocks.size())});
    } else {
      const size_t last = alive.size() - 1;
      const size_t i = last_in_first_out ? last : draw(static_cast<uint32_t>(last) + 1);
      program.blocks[alive[i]].death = event++;
      alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return program;
}

TEST(Planner, LivingBlocksNeverOverlap) {
  double worst = 1;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Program program = random_program(seed, false);
    assign_offsets(program);
    expect_sound(program);
    if (HasFatalFailure()) return;
    if (program.peak_bytes == 0) continue;
    worst = std::max(worst, static_cast<double>(program.arena_bytes) /
                                static_cast<double>(program.peak_bytes));
  }
  std::printf("worst arena of random lifetimes: %.3f of the peak\n", worst);
}

TEST(Planner, StacksNeedLittleMoreThanTheirPeak) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Program program = random_program(seed, true);
    assign_offsets(program);
    expect_sound(program);
    EXPECT_LE(static_cast<double>(program.arena_bytes),
              1.10 * static_cast<double>(program.peak_bytes));
    if (HasFailure()) return;
  }
}

// Forward keeps activations of falling use, backward frees them while gradients come and go: what a
// training step looks like.
TEST(Planner, ForwardAndBackwardNeedLittleMoreThanTheirPeak) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 engine(seed);
    const size_t layers = 2 + engine() % 30;
    Program program{.name = "step", .blocks = {}};
    int64_t event = 0;
    std::vector<size_t> saved;
    const auto add = [&](size_t bytes) {
      program.blocks.push_back({.bytes = 256 * bytes, .birth = event++, .label = "block"});
      return program.blocks.size() - 1;
    };
    for (size_t i = 0; i < layers; ++i) {
      saved.push_back(add(1 + engine() % 64));
      const size_t passing = add(1 + engine() % 64);
      program.blocks[passing].death = event++;
    }
    size_t gradient = add(8);
    for (size_t i = layers; i-- > 0;) {
      const size_t next = add(8);
      program.blocks[saved[i]].death = event++;
      program.blocks[gradient].death = event++;
      gradient = next;
    }
    program.blocks[gradient].death = event++;
    assign_offsets(program);
    expect_sound(program);
    EXPECT_LE(static_cast<double>(program.arena_bytes),
              1.10 * static_cast<double>(program.peak_bytes));
    if (HasFailure()) return;
  }
}

TEST(Planner, NoBlocksNeedNothing) {
  Program program;
  assign_offsets(program);
  EXPECT_EQ(program.arena_bytes, 0u);
  EXPECT_EQ(program.peak_bytes, 0u);
  std::vector<Block> none;
  EXPECT_EQ(assign_persistent_offsets(none), 0u);
}

}  // namespace
}  // namespace shardrun
