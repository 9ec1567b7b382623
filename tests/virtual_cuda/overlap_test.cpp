// Communication beside computation: that every wait between the two streams is needed, and that the
// host waits for neither inside a micro-step.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <map>
#include <sstream>
#include <vector>

#include "runtime/random.h"
#include "tests/sharding/odd_model.h"
#include "tests/sharding/step_fixture.h"
#include "tests/virtual_cuda/nvtx.h"
#include "tests/virtual_cuda/runtime.h"

namespace shardrun::test {
namespace {

using virtual_cuda::Kind;
using virtual_cuda::Ran;

StepCase overlapping(int zero) {
  StepCase c;
  c.gpt = tiny_gpt();
  c.gpt.layers = 3;
  c.gpt.context = 8;
  c.precision = Precision::bf16;
  c.wire = Dtype::bf16;
  c.leaves = 4;
  c.steps = 2;
  c.world_size = 2;
  c.zero = zero;
  c.arena = true;
  c.nccl = true;
  c.gpus = 2;
  c.prefetch = 1;
  return c;
}

constexpr const char* kExchange = "ncclGroupEnd";

void begin(uint64_t seed) {
  virtual_cuda::reset({.seed = seed, .devices = 2});
}

// A process of its own: what reads garbage may die of it. The parent has no threads.
std::string in_child(FunctionRef<std::string()> body) {
  int ends[2];
  if (::pipe(ends) != 0) throw IoError("no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = fmt::format("error: {}", error.what());
    }
    const ssize_t written = ::write(ends[1], text.data(), text.size());
    ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  char piece[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], piece, sizeof piece)) > 0;) {
    text.append(piece, static_cast<size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? text : fmt::format("ended with status {}", status);
}

// What a run leaves, in a word; without the given waits of device 0.
std::string bits_of(const StepCase& c, uint64_t seed, const std::vector<int64_t>& dropped = {}) {
  return in_child([&] {
    begin(seed);
    for (const int64_t n : dropped) virtual_cuda::drop("cudaStreamWaitEvent", n, 0);
    const StepResult result = run_steps(c);
    uint64_t hash = std::bit_cast<uint64_t>(result.reports.back().decision.norm);
    for (const auto& [name, bits] : result.tensors) {
      for (const uint32_t b : bits) hash = mix64(hash, b);
    }
    return fmt::format("bits {:016x}", hash);
  });
}

// The waits between streams of one run on device 0, in the order in which the host asks for them: a
// line each, what it is for.
std::string waits_of(const StepCase& c) {
  begin(0);
  virtual_cuda::keep_log(true);
  run_steps(c);
  std::vector<Ran> log = virtual_cuda::take_log();
  std::erase_if(log, [](const Ran& ran) { return ran.device != 0; });
  std::sort(log.begin(), log.end(), [](const Ran& a, const Ran& b) { return a.given < b.given; });
  const auto is_call = [](const Ran& ran) {
    return ran.kind == Kind::library && ran.name.starts_with("nccl");
  };
  const auto reduces =
      std::find_if(log.begin(), log.end(), [](const Ran& ran) { return ran.name == kExchange; });
  const int communication = reduces->stream;
  std::map<int64_t, std::string> calls;  // by the record after them
  std::string last_call;
  for (const Ran& ran : log) {
    if (ran.stream != communication) continue;
    if (ran.kind == Kind::record) calls[ran.given] = last_call;
    if (is_call(ran)) last_call = ran.name;
  }
  const size_t units = static_cast<size_t>(c.gpt.layers) + 2;
  size_t reductions = 0;
  std::string waits;
  for (size_t i = 0; i < log.size(); ++i) {
    if (log[i].kind != Kind::wait) continue;
    if (log[i].stream != communication) {
      const std::string& call = calls[log[i].waited_for];
      const bool last = call == kExchange && ++reductions % units == 0;
      waits += fmt::format("compute for {}{}\n", call, last ? ", the last" : "");
      continue;
    }
    size_t next = i;
    while (log[next].stream != communication || !is_call(log[next])) ++next;
    waits += log[next].name + " for compute\n";
  }
  return waits;
}

// Without the waits of one kind, some order of work has other bits, or fails.
class DroppedWaits : public testing::TestWithParam<int> {};

TEST_P(DroppedWaits, AreCaught) {
  const StepCase c = overlapping(GetParam());
  std::map<std::string, std::vector<int64_t>> kinds;
  std::istringstream waits(in_child([&] { return waits_of(c); }));
  int64_t number = 0;
  for (std::string line; std::getline(waits, line);) kinds[line].push_back(++number);
  EXPECT_EQ(kinds.size(), 5) << "kinds of waits";
  const std::string expected = bits_of(c, 0);
  ASSERT_TRUE(expected.starts_with("bits")) << expected;
  for (uint64_t seed = 1; seed <= 4; ++seed) EXPECT_EQ(bits_of(c, seed), expected) << seed;
  constexpr uint64_t kSeeds = 40;
  for (const auto& [kind, calls] : kinds) {
    uint64_t seed = 1;
    while (seed <= kSeeds && bits_of(c, seed, calls) == expected) ++seed;
    EXPECT_LE(seed, kSeeds) << "without its " << calls.size() << " waits of " << kind
                            << " a run has the same bits: they are redundant";
    fmt::print("{}: {} waits, missed at seed {}\n", kind, calls.size(), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, DroppedWaits, testing::Values(2, 3));

// For profilers: what a step gives the device, by name.
TEST(Overlap, RangesNameTheStep) {
  const std::string ranges = in_child([] {
    StepCase c = overlapping(3);
    c.gpt.layers = 1;
    c.leaves = 2;
    c.recompute = 1;
    begin(0);
    std::string text;
    run_steps(
        c, [](TrainStep&, int, int64_t) { virtual_cuda::take_ranges(); },
        [&](TrainStep&, int rank, int64_t, const StepReport&) {
          if (rank == 0) text = virtual_cuda::take_ranges();
        });
    return text;
  });
  EXPECT_EQ(ranges,
            "micro_step(embedding(gather()gather())h.0(gather())head()"
            "backward(head(gather()reduce())h.0(gather()reduce())embedding(reduce())))"
            "decision()update()");
}

// Neither for a stream nor for an event: the decision polls.
TEST(Overlap, HostWaitsForNothingInAMicroStep) {
  for (const int zero : {0, 1, 2, 3}) {
    const std::string waits = in_child([&] {
      StepCase c = overlapping(zero);
      c.leaves = 10;
      begin(1);
      int64_t n = 0;
      run_steps(c, {}, [&](TrainStep&, int rank, int64_t, const StepReport&) {
        if (rank != 0) return;
        for (const char* call : {"Stream", "Event", "Device"}) {
          n += virtual_cuda::calls(fmt::format("cuda{}Synchronize", call), 0);
        }
      });
      return fmt::format("{} waits", n);
    });
    EXPECT_EQ(waits, "0 waits") << "zero " << zero;
  }
}

}  // namespace
}  // namespace shardrun::test
