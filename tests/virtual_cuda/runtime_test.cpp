// The virtual CUDA runtime holds what CUDA promises, and nothing that it does not.
#include "tests/virtual_cuda/runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace shardrun::virtual_cuda {
namespace {

#define OK(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaPeekAtLastError())

// Memory of every kind and two streams, on device 0; nothing may be left behind.
class VirtualRuntime : public testing::Test {
 protected:
  static constexpr int kCount = 64;
  static constexpr size_t kBytes = kCount * sizeof(int);

  void SetUp() override { start({}); }
  void start(const Settings& settings) {
    close();
    reset(settings);
    OK(cudaSetDevice(0));
    OK(cudaMalloc(reinterpret_cast<void**>(&device), kBytes));
    OK(cudaMallocHost(reinterpret_cast<void**>(&host), kBytes));
    for (cudaStream_t* stream : {&a, &b}) {
      OK(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, 0));
    }
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  void seed(uint64_t value) {
    Settings settings;
    settings.seed = value;
    start(settings);
  }
  void close() {
    if (!device) return;
    cudaFree(device);
    cudaFreeHost(host);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaEventDestroy(event);
    device = nullptr;
  }
  void TearDown() override {
    close();
    const Living left = living();
    EXPECT_EQ(left.allocations + left.host_allocations + left.streams + left.events, 0);
    reset();
  }

  // Appends to `order` when it runs.
  Work mark(int what) {
    return {Kind::library, "mark", 0, [this, what] { order.push_back(what); }, {}};
  }

  int* device = nullptr;
  int* host = nullptr;
  cudaStream_t a = nullptr, b = nullptr;
  cudaEvent_t event = nullptr;
  std::vector<int> order;
};

std::string text(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- order

TEST_F(VirtualRuntime, WorkIsLate) {
  OK(submit(a, mark(1)));
  EXPECT_TRUE(order.empty());
  OK(cudaStreamSynchronize(b));  // another stream's
  EXPECT_TRUE(order.empty());
  OK(cudaStreamSynchronize(a));
  EXPECT_EQ(order, std::vector<int>{1});
}

TEST_F(VirtualRuntime, SeedsDrawDifferentOrdersAndRepeatThem) {
  const auto run = [&](uint64_t value) {
    seed(value);
    order.clear();
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(submit(a, mark(i)), cudaSuccess);
      EXPECT_EQ(submit(b, mark(10 + i)), cudaSuccess);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return order;
  };
  std::set<std::vector<int>> orders;
  bool b_first = false, a_alone_first = false;
  for (uint64_t s = 0; s < 50; ++s) {
    const std::vector<int> got = run(s);
    ASSERT_EQ(got.size(), 12u);
    std::vector<int> of_a, of_b;
    for (int what : got) (what < 10 ? of_a : of_b).push_back(what);
    EXPECT_EQ(of_a, (std::vector<int>{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(of_b, (std::vector<int>{10, 11, 12, 13, 14, 15}));
    EXPECT_EQ(run(s), got) << "seed " << s;
    orders.insert(got);
    b_first = b_first || got.front() == 10;
    a_alone_first = a_alone_first || got[5] == 5;
  }
  EXPECT_GE(orders.size(), 25u);
  EXPECT_TRUE(b_first);
  EXPECT_TRUE(a_alone_first) << "no stream ever runs far ahead";
}

// Some seeds run work before the host waits.
TEST_F(VirtualRuntime, SomeSeedsAreEager) {
  bool late = false, early = false;
  for (uint64_t s = 0; s < 12; ++s) {
    seed(s);
    order.clear();
    for (int i = 0; i < 16; ++i) OK(submit(a, mark(i)));
    (order.empty() ? late : early) = true;
  }
  EXPECT_TRUE(late && early);
}

TEST_F(VirtualRuntime, EventsOrderStreams) {
  for (const bool waits : {true, false}) {
    int wrong = 0;
    for (uint64_t s = 0; s < 40; ++s) {
      seed(s);
      order.clear();
      OK(submit(a, mark(1)));
      OK(cudaEventRecord(event, a));
      OK(submit(a, mark(3)));
      if (waits) {
        OK(cudaStreamWaitEvent(b, event, 0));
      }
      OK(submit(b, mark(2)));
      OK(cudaDeviceSynchronize());
      const auto at = [&](int what) { return std::find(order.begin(), order.end(), what); };
      wrong += at(2) < at(1);
    }
    EXPECT_EQ(wrong > 0, !waits);
  }
}

// A wait is for the recording that was the last when it was given; one recorded later, or never,
// holds nobody up.
TEST_F(VirtualRuntime, RecordingAgain) {
  bool before_second = false;
  for (uint64_t s = 0; s < 40; ++s) {
    seed(s);
    order.clear();
    OK(cudaStreamWaitEvent(b, event, 0));  // never recorded
    OK(submit(a, mark(1)));
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event, 0));
    OK(submit(a, mark(2)));
    OK(cudaEventRecord(event, a));
    OK(submit(b, mark(3)));
    OK(cudaStreamSynchronize(b));
    EXPECT_EQ(order.front(), 1);
    before_second = before_second || order[1] == 3;
    OK(cudaEventSynchronize(event));
    EXPECT_NE(std::find(order.begin(), order.end(), 2), order.end());
  }
  EXPECT_TRUE(before_second);
}

TEST_F(VirtualRuntime, QueriesMoveWork) {
  for (int i = 0; i < 3; ++i) OK(submit(a, mark(i)));
  OK(cudaEventRecord(event, a));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(a), cudaErrorNotReady);
  int polls = 2;
  while (cudaEventQuery(event) == cudaErrorNotReady && polls < 100) ++polls;
  EXPECT_EQ(polls, 3);
  EXPECT_EQ(order.size(), 3u);
}

TEST_F(VirtualRuntime, TimesBetweenEvents) {
  cudaEvent_t begin, end;
  float milliseconds = -1;
  for (cudaEvent_t* e : {&begin, &end}) OK(cudaEventCreateWithFlags(e, cudaEventDefault));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  OK(cudaEventRecord(begin, a));
  OK(cudaMemsetAsync(device, 0, kBytes, a));
  OK(cudaEventRecord(end, a));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
  OK(cudaEventSynchronize(end));
  OK(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GE(milliseconds, 0);
  OK(cudaEventRecord(event, a));
  OK(cudaEventSynchronize(event));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, event), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t e : {begin, end}) OK(cudaEventDestroy(e));
}

TEST_F(VirtualRuntime, DestroyingAStreamFinishesIt) {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
  OK(submit(stream, mark(1)));
  OK(cudaStreamDestroy(stream));
  EXPECT_EQ(order, std::vector<int>{1});
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
}

// ---- copies

TEST_F(VirtualRuntime, PinnedCopiesAreLate) {
  host[0] = 1;
  OK(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyDefault, a));
  host[0] = 2;  // too early: the copy has not read it
  OK(cudaStreamSynchronize(a));
  EXPECT_EQ(device[0], 2);
  OK(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDefault, a));
  host[0] = 3;
  OK(cudaStreamSynchronize(a));
  EXPECT_EQ(host[0], 2);
}

TEST_F(VirtualRuntime, PageableCopies) {
  std::vector<int> pageable(kCount, 5);
  OK(cudaMemcpyAsync(device, pageable.data(), kBytes, cudaMemcpyDefault, a));
  EXPECT_NE(device[0], 5);
  pageable.assign(kCount, 6);  // allowed: it was read
  OK(cudaStreamSynchronize(a));
  EXPECT_EQ(device[0], 5);
  device[0] = 7;
  OK(cudaMemcpyAsync(pageable.data(), device, kBytes, cudaMemcpyDefault, a));
  EXPECT_EQ(pageable[0], 7);
}

TEST_F(VirtualRuntime, CopiesOutsideOfAnAllocation) {
  const cudaError_t past = cudaMemcpyAsync(device, host, kBytes + 1, cudaMemcpyDefault, a);
  EXPECT_TRUE(has(text(past), "cudaErrorInvalidValue: 257 bytes at")) << text(past);
  EXPECT_NE(cudaMemcpyAsync(device + kCount, host, 4, cudaMemcpyDefault, a), cudaSuccess);
  EXPECT_NE(cudaMemcpyAsync(device - 1, host, 4, cudaMemcpyDefault, a), cudaSuccess);
  OK(cudaMemcpyAsync(device + kCount - 1, host, 4, cudaMemcpyDefault, a));
  std::vector<int> x(4), y(4);
  const cudaError_t neither = cudaMemcpyAsync(x.data(), y.data(), 4, cudaMemcpyDefault, a);
  EXPECT_TRUE(has(text(neither), "neither")) << text(neither);
  const cudaError_t kind = cudaMemcpyAsync(x.data(), host, 4, cudaMemcpyDeviceToHost, a);
  EXPECT_TRUE(has(text(kind), "from host memory to host memory")) << text(kind);
}

// Both kinds are there: schedules in which one stream does most before another begins, and mixed ones.
TEST_F(VirtualRuntime, SomeSeedsRunOneStreamFarAhead) {
  constexpr int kEach = 200;
  int a_ahead = 0, b_ahead = 0, mixed = 0;
  for (uint64_t s = 1; s <= 90; ++s) {
    seed(s);
    keep_log(true);
    for (int i = 0; i < kEach; ++i) {
      OK(cudaMemsetAsync(device, 0, 1, a));
      OK(cudaMemsetAsync(host, 0, 1, b));
    }
    OK(cudaDeviceSynchronize());
    int lead = 0, most = 0, least = 0;  // of a over b
    for (const Ran& ran : take_log()) {
      lead += ran.stream == 1 ? 1 : -1;
      most = std::max(most, lead);
      least = std::min(least, lead);
    }
    a_ahead += most >= kEach * 3 / 4;
    b_ahead += least <= -kEach * 3 / 4;
    mixed += most < kEach / 3 && least > -kEach / 3;
  }
  EXPECT_GE(a_ahead, 5);
  EXPECT_GE(b_ahead, 5);
  EXPECT_GE(mixed, 20);
}

// ---- memory

TEST_F(VirtualRuntime, NewMemoryIsNan) {
  EXPECT_TRUE(std::isnan(*reinterpret_cast<float*>(device)));
  EXPECT_TRUE(std::isnan(*reinterpret_cast<double*>(host)));
  EXPECT_EQ(*reinterpret_cast<uint16_t*>(device) & 0x7fff, 0x7fff);  // bf16, fp16
}

TEST_F(VirtualRuntime, Limit) {
  Settings settings;
  settings.memory_bytes = 1024;
  start(settings);
  size_t free = 0, total = 0;
  OK(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(total, 1024u);
  EXPECT_EQ(free, 1024u - kBytes);
  void* rest = nullptr;
  EXPECT_EQ(cudaMalloc(&rest, free + 1), cudaErrorMemoryAllocation);
  OK(cudaMalloc(&rest, free));
  OK(cudaFree(rest));
  EXPECT_EQ(living(0).most_bytes, 1024u);
  EXPECT_EQ(living(0).bytes, kBytes);
}

TEST_F(VirtualRuntime, FreeingTwiceAndWhatIsNotThere) {
  void* data = nullptr;
  OK(cudaMalloc(&data, 8));
  OK(cudaFree(data));
  EXPECT_TRUE(has(text(cudaFree(data)), "was freed already"));
  reset();
  EXPECT_TRUE(has(text(cudaFree(host)), "is pinned host memory"));
  reset();
  EXPECT_TRUE(has(text(cudaFree(device + 1)), "not where an allocation begins"));
  reset();
}

TEST_F(VirtualRuntime, PinnedMemoryOutlivesItsCopies) {
  void* pinned = nullptr;
  for (const bool off : {true, false}) {
    OK(cudaMallocHost(&pinned, kBytes));
    void *to = off ? pinned : device, *from = off ? device : pinned;
    OK(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, a));
    EXPECT_DEATH(cudaFreeHost(pinned), "freed before the copy #[0-9]+ .* on stream 1 of device 0");
    OK(cudaStreamSynchronize(a));
    OK(cudaFreeHost(pinned));
  }
}

#ifndef __SANITIZE_ADDRESS__
TEST_F(VirtualRuntime, OverrunsAreMetWhenFreed) {
  for (const int at : {-1, 8}) {
    std::byte* data = nullptr;
    OK(cudaMalloc(reinterpret_cast<void**>(&data), 8));
    data[at] = std::byte{1};
    const cudaError_t error = cudaFree(data);
    EXPECT_TRUE(has(text(error), "something wrote byte " + std::to_string(at))) << text(error);
    EXPECT_NE(cudaStreamSynchronize(a), cudaSuccess);  // nobody looks at what cudaFree says
    reset();
  }
}
#endif

TEST_F(VirtualRuntime, FreeWaitsForTheDevice) {
  void* data = nullptr;
  OK(cudaMalloc(&data, kBytes));
  OK(cudaMemcpyAsync(data, host, kBytes, cudaMemcpyDefault, a));
  OK(submit(b, mark(1)));
  OK(cudaFree(data));
  EXPECT_EQ(order, std::vector<int>{1});
}

// ---- errors

TEST_F(VirtualRuntime, PlannedFailures) {
  fail("cudaEventRecord", 2, cudaErrorUnknown);
  OK(cudaEventRecord(event, a));
  const cudaError_t error = cudaEventRecord(event, a);
  EXPECT_EQ(text(error), "cudaErrorUnknown: a planned failure");
  EXPECT_EQ(cudaGetLastError(), cudaErrorUnknown);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  OK(cudaEventRecord(event, a));
  EXPECT_EQ(faults_met(), 1);
  EXPECT_EQ(calls("cudaEventRecord"), 3);
  EXPECT_EQ(calls("cudaEventRecord", 1), 0);
}

TEST_F(VirtualRuntime, DroppedWait) {
  bool missed = false;
  for (uint64_t s = 0; s < 40; ++s) {
    seed(s);
    order.clear();
    drop("cudaStreamWaitEvent", 1);
    OK(submit(a, mark(1)));
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event, 0));
    OK(submit(b, mark(2)));
    OK(cudaDeviceSynchronize());
    EXPECT_EQ(faults_met(), 1);
    missed = missed || order.front() == 2;
  }
  EXPECT_TRUE(missed);
}

TEST_F(VirtualRuntime, ABrokenDeviceAnswersWithItsError) {
  OK(submit(
      a, {Kind::kernel, "bad", 0, [] { throw std::runtime_error("kernel bad: thread 3"); }, {}}));
  const cudaError_t error = cudaStreamSynchronize(a);
  EXPECT_EQ(text(error), "cudaErrorLaunchFailure: kernel bad: thread 3");
  EXPECT_EQ(cudaEventRecord(event, b), cudaErrorLaunchFailure);
  OK(cudaSetDevice(1));  // another one is sound
  OK(cudaDeviceSynchronize());
  OK(cudaSetDevice(0));
}

TEST_F(VirtualRuntime, WaitingInVain) {
  Settings settings;
  settings.deadline_ms = 50;
  start(settings);
  OK(submit(a, {Kind::library, "all_gather", 0, [] {}, [] { return false; }}));
  OK(cudaEventRecord(event, a));
  OK(cudaStreamWaitEvent(b, event, 0));
  const cudaError_t error = cudaStreamSynchronize(b);
  EXPECT_EQ(error, cudaErrorLaunchTimeout);
  EXPECT_TRUE(has(text(error),
                  "stream 1 stands at library 'all_gather', which waits for other "
                  "ranks; stream 2 stands at wait 'event', which waits for record 1"))
      << text(error);
}

TEST_F(VirtualRuntime, StreamsOfOtherDevices) {
  OK(cudaSetDevice(1));
  const cudaError_t error = submit(a, mark(1));
  EXPECT_TRUE(has(text(error), "stream 1 is of device 0, current is device 1")) << text(error);
  cudaEvent_t other = nullptr;
  OK(cudaEventCreateWithFlags(&other, cudaEventDisableTiming));
  EXPECT_EQ(cudaEventRecord(other, a), cudaErrorInvalidResourceHandle);
  OK(cudaEventDestroy(other));
  OK(cudaSetDevice(0));
  EXPECT_EQ(cudaSetDevice(8), cudaErrorInvalidDevice);
  EXPECT_TRUE(has(text(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal)), "no graphs"));
}

// ---- ranks

// Work that waits for the other rank, as a collective does. The second rank waits for the first by
// other means in between, and its half of the collective goes on meanwhile.
TEST_F(VirtualRuntime, RanksAsThreads) {
  std::atomic<int> here = 0;
  std::atomic<bool> first_is_done = false;
  const auto rank = [&](int index) {
    ASSERT_EQ(cudaSetDevice(index), cudaSuccess);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
    auto begun = std::make_shared<bool>(false);
    ASSERT_EQ(submit(stream, {Kind::library, "both", 0, [] {},
                              [&here, begun] {
                                here += !std::exchange(*begun, true);
                                return here == 2;
                              }}),
              cudaSuccess);
    while (index == 2 && !first_is_done) std::this_thread::yield();
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    if (index == 1) first_is_done = true;
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  };
  std::jthread one(rank, 1), two(rank, 2);
}

TEST_F(VirtualRuntime, LogTellsTheSchedule) {
  keep_log(true);
  OK(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyDefault, a));
  OK(cudaEventRecord(event, a));
  OK(cudaStreamWaitEvent(b, event, 0));
  OK(cudaDeviceSynchronize());
  EXPECT_EQ(log_text(take_log()),
            "device 0 stream 1: #0 copy 'host to device' 256 bytes\n"
            "device 0 stream 1: #1 record 'event' 0 bytes\n"
            "device 0 stream 2: #2 wait 'event' 0 bytes for #1\n");
  EXPECT_TRUE(take_log().empty());
}

}  // namespace
}  // namespace shardrun::virtual_cuda
