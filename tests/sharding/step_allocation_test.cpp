// A step after the second takes no memory from the heap: everything lives in the planned arena or in
// containers that keep their size. Counted by replacing operator new in this executable.
#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/sharding/step_fixture.h"

namespace {

std::atomic<int64_t> allocations{0};
std::atomic<bool> counting{false};

// oneDNN allocates inside its own calls; that is not ours to plan.
bool inside_onednn() {
  void* frames[32];
  const int depth = backtrace(frames, 32);
  for (int i = 0; i < depth; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) && info.dli_fname && std::strstr(info.dli_fname, "libdnnl")) {
      return true;
    }
  }
  return false;
}

void count() {
  if (counting.load(std::memory_order_relaxed) && !inside_onednn()) allocations.fetch_add(1);
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  count();
  if (void* data = std::malloc(bytes ? bytes : 1)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  count();
  const size_t a = static_cast<size_t>(alignment);
  if (void* data = std::aligned_alloc(a, (bytes + a - 1) / a * a)) return data;
  throw std::bad_alloc();
}
// Inlining would show the compiler a free() after a new and make it warn.
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }

namespace shardrun::test {
namespace {

class StepAllocations : public testing::TestWithParam<Precision> {};

TEST_P(StepAllocations, NothingAfterTheSecondStep) {
  for (int zero : {0, 1, 2, 3}) {
    for (int recompute : {0, 1}) {
      const Gpt model(tiny_gpt());
      // One thread: with several, which of them first meets a shape, and then keeps oneDNN's primitive
      // for it, is a matter of chance.
      ThreadPool pool(1);
      const auto group = ThreadGroup::make(1);
      const auto comm = group->communicator(0);
      StepOptions options;
      options.shard.zero = zero;
      options.shard.precision = GetParam();
      options.shard.wire = GetParam() == Precision::fp32 ? Dtype::fp32 : compute_dtype(GetParam());
      options.micro_batch = 2;
      options.global_batch = 6;
      options.seq_len = tiny_gpt().context;
      options.recompute_every = recompute;
      const std::string policy = GetParam() == Precision::fp16 ? "static:256" : "none";
      SyntheticLeaves leaves(tiny_gpt().vocabulary);
      RecordingMemory recorder;
      {
        Stream meta(DeviceKind::meta, detect_isa(), &pool);
        const auto meta_comm = make_meta_communicator(0, 1, "thread");
        TrainStep rehearsal(model, options, policy, *meta_comm, recorder, meta);
        rehearsal.initialize();
        rehearsal(0, 1e-3, leaves);
      }
      const auto memory = make_arena_memory(recorder.plan());
      Stream stream(DeviceKind::cpu, detect_isa(), &pool);
      TrainStep step(model, options, policy, *comm, *memory, stream);
      step.initialize();
      for (int64_t s = 0; s < 5; ++s) {
        allocations = 0;
        counting = true;
        const StepReport report = step(s, 1e-3, leaves);
        counting = false;
        ASSERT_TRUE(report.decision.apply());
        if (s >= 2) {
          EXPECT_EQ(allocations.load(), 0) << "zero " << zero << " recompute " << recompute << " step " << s;
        }
      }
    }
  }
}

TEST(StepAllocation, CounterCounts) {
  allocations = 0;
  counting = true;
  ::operator delete(::operator new(8));
  counting = false;
  EXPECT_EQ(allocations.load(), 1);
}

INSTANTIATE_TEST_SUITE_P(Precisions, StepAllocations,
                         testing::Values(Precision::fp32, Precision::bf16, Precision::fp16,
                                         Precision::bf16_true));

}  // namespace
}  // namespace shardrun::test
