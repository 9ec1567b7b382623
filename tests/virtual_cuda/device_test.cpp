// The virtual device itself: it runs what is right and names what is wrong.
#include <gtest/gtest.h>

#include "tests/virtual_cuda/device.h"

// After the device, which stands in for the toolkit's header.
#include "kernels/cuda/launch.h"

namespace shardrun {
namespace {

using cuda::DynamicShared;
using cuda::Launch;
using cuda::launch;
using cuda::Shared;
using virtual_cuda::Violation;

constexpr unsigned kAll = 0xffffffffu;

template <typename Kernel, typename... Arguments>
void run(Kernel kernel, dim3 grid, dim3 block, Arguments... arguments) {
  launch(Launch{"probe", grid, block, nullptr}, kernel, arguments...);
}

// The message of the violation, or nothing.
template <typename Kernel, typename... Arguments>
std::string violation(size_t shared_bytes, Kernel kernel, dim3 grid, dim3 block,
                      Arguments... arguments) {
  try {
    launch(Launch{"probe", grid, block, nullptr, shared_bytes}, kernel, arguments...);
  } catch (const Violation& e) {
    return e.what();
  }
  return "";
}

void expect_violation(const std::string& got, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    EXPECT_NE(got.find(part), std::string::npos) << "got '" << got << "', wanted '" << part << "'";
  }
}

__global__ void count_kernel(int* count) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  ++count[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

TEST(Device, EachThreadOfEachBlockRunsOnce) {
  std::vector<int> count(2 * 3 * 4 * 5 * 3 * 2);
  run(count_kernel, dim3(2, 3, 4), dim3(5, 3, 2), count.data());
  for (int c : count) EXPECT_EQ(c, 1);
}

// Sum of a block of any size, over shared memory.
__global__ void sum_kernel(int* out, const int* in) {
  __shared__ Shared<int, 1024> numbers;
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  numbers[t] = in[static_cast<int>(blockIdx.x) * n + t];
  for (int distance = 1; distance < n; distance *= 2) {
    __syncthreads();
    if (t % (2 * distance) == 0 && t + distance < n) numbers[t] += numbers[t + distance];
  }
  if (t == 0) out[blockIdx.x] = numbers[0];
}

TEST(Device, BarriersAndSharedMemory) {
  for (int n : {1, 7, 32, 33, 1024}) {
    std::vector<int> in(static_cast<size_t>(3 * n)), out(3);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i);
    run(sum_kernel, dim3(3), dim3(static_cast<unsigned>(n)), out.data(), in.data());
    for (int b = 0; b < 3; ++b) {
      EXPECT_EQ(out[static_cast<size_t>(b)], b * n * n + n * (n - 1) / 2);
    }
  }
}

__global__ void warp_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int* o = out + 8 * threadIdx.x;
  o[0] = __shfl_xor_sync(kAll, lane, 5);
  o[1] = __shfl_down_sync(kAll, lane, 3);
  o[2] = __shfl_up_sync(kAll, lane, 3);
  o[3] = __shfl_sync(kAll, lane, 9, 8);
  o[4] = __ballot_sync(kAll, lane % 3 == 0) == 0x49249249u;
  o[5] = __any_sync(kAll, lane == 7) + 2 * __all_sync(kAll, lane == 7) +
         4 * __all_sync(kAll, lane < 32);
  // Halves of a warp go different ways, each with its own mask.
  if (lane < 16) {
    o[6] = __shfl_sync(0x0000ffffu, lane, 15);
  } else {
    o[6] = __shfl_sync(0xffff0000u, lane, 16);
  }
  o[7] = static_cast<int>(__shfl_down_sync(kAll, 0.5 * lane, 1) * 2);
}

TEST(Device, ShufflesAndVotes) {
  std::vector<int> out(64 * 8);
  run(warp_kernel, dim3(1), dim3(64), out.data());
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32;
    const int* o = &out[static_cast<size_t>(8 * t)];
    EXPECT_EQ(o[0], lane ^ 5);
    EXPECT_EQ(o[1], lane + 3 < 32 ? lane + 3 : lane);
    EXPECT_EQ(o[2], lane >= 3 ? lane - 3 : lane);
    EXPECT_EQ(o[3], lane / 8 * 8 + 1);
    EXPECT_EQ(o[4], 1);
    EXPECT_EQ(o[5], 5);
    EXPECT_EQ(o[6], lane < 16 ? 15 : 16);
    EXPECT_EQ(o[7], lane < 31 ? lane + 1 : 31);
  }
}

__global__ void vote_kernel(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  const int any = __syncthreads_or(t == 40), all = __syncthreads_and(t < 40);
  const int count = __syncthreads_count(t >= 40);
  out[t] = 100 * count + 10 * any + all;
}

TEST(Device, VotesOfABlock) {
  std::vector<int> out(50);
  run(vote_kernel, dim3(1), dim3(50), out.data());
  for (int o : out) EXPECT_EQ(o, 1010);
}

__global__ void leaves_early_kernel() {
  if (threadIdx.x == 37 && blockIdx.x == 1) return;
  __syncthreads();
}
__global__ void two_barriers_kernel() {
  if (threadIdx.x < 3) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(Device, NamesABarrierThatNotAllReach) {
  expect_violation(violation(0, leaves_early_kernel, dim3(2), dim3(64)),
                   {"kernel probe", "block (1, 0, 0)", "thread (0, 0, 0)",
                    "thread (37, 0, 0) has left", "barrier at device_test.cpp"});
  expect_violation(violation(0, two_barriers_kernel, dim3(1), dim3(64)),
                   {"thread (3, 0, 0) is at device_test.cpp"});
  // A violation leaves the device in order.
  std::vector<int> out(50);
  run(vote_kernel, dim3(1), dim3(50), out.data());
  EXPECT_EQ(out[49], 1010);
}

__global__ void divergent_shuffle_kernel() {
  if (threadIdx.x != 35) __shfl_xor_sync(kAll, 1, 1);
}
__global__ void shuffle_or_barrier_kernel() {
  if (threadIdx.x == 2) __syncthreads();
  __shfl_xor_sync(kAll, 1, 1);
  if (threadIdx.x != 2) __syncthreads();
}
__global__ void other_mask_kernel() {
  __any_sync(threadIdx.x < 2 ? kAll : 0xfffffffeu, 1);
}
__global__ void outside_mask_kernel() {
  if (threadIdx.x < 8) __shfl_down_sync(0xffu, 1, 4);
}
__global__ void own_lane_kernel() {
  __ballot_sync(0xfu, 1);
}
__global__ void whole_mask_kernel() {
  __shfl_sync(kAll, 1, 0);
}

TEST(Device, NamesAShuffleThatNotAllReach) {
  expect_violation(violation(0, divergent_shuffle_kernel, dim3(1), dim3(64)),
                   {"thread (32, 0, 0)", "shuffle by xor", "thread (35, 0, 0) has left"});
  expect_violation(violation(0, shuffle_or_barrier_kernel, dim3(1), dim3(64)),
                   {"thread (0, 0, 0)", "thread (2, 0, 0) is at"});
  expect_violation(violation(0, other_mask_kernel, dim3(1), dim3(32)), {"with another mask"});
  expect_violation(violation(0, outside_mask_kernel, dim3(1), dim3(32)),
                   {"thread (4, 0, 0)", "reads lane 8, which is not in the mask (000000ff)"});
  expect_violation(violation(0, own_lane_kernel, dim3(1), dim3(32)),
                   {"thread (4, 0, 0)", "lacks the own lane"});
  expect_violation(violation(0, whole_mask_kernel, dim3(1), dim3(16)), {"lanes that do not exist"});
}

// Writes element `at` in thread `writer`, then, as `how` says, goes on to read or write it in
// `second`.
enum class Between { nothing, barrier, warp_barrier };
__global__ void touch_kernel(unsigned writer, unsigned second, bool read_first, bool read_second,
                             Between between) {
  __shared__ Shared<float, 4> numbers;
  if (read_first) {
    if (threadIdx.x == 0) numbers[2] = 1;
    __syncthreads();
  }
  float sink = 0;
  if (threadIdx.x == writer) {
    if (read_first) {
      sink += numbers[2];
    } else {
      numbers[2] = 1;
    }
  }
  if (between == Between::barrier) __syncthreads();
  if (between == Between::warp_barrier) __syncwarp();
  if (threadIdx.x == second) {
    if (read_second) {
      sink += numbers[2];
    } else {
      numbers[2] = sink;
    }
  }
}

TEST(Device, NamesAMissingBarrier) {
  const auto touch = [](unsigned a, unsigned b, bool read_a, bool read_b, Between between) {
    return violation(0, touch_kernel, dim3(1), dim3(64), a, b, read_a, read_b, between);
  };
  expect_violation(touch(3, 40, false, true, Between::nothing),
                   {"thread (40, 0, 0): reads element 2", "written by thread (3, 0, 0)"});
  expect_violation(touch(3, 40, false, false, Between::nothing), {"writes", "written by"});
  expect_violation(touch(3, 40, true, false, Between::nothing),
                   {"writes", "read by thread (3, 0, 0)"});
  expect_violation(touch(3, 4, false, true, Between::nothing), {"reads", "written by"});
  expect_violation(touch(3, 40, false, true, Between::warp_barrier), {"reads", "written by"});
  for (bool read_a : {false, true}) {
    for (bool read_b : {false, true}) {
      EXPECT_EQ(touch(3, 40, read_a, read_b, Between::barrier), "");
      EXPECT_EQ(touch(3, 4, read_a, read_b, Between::warp_barrier), "");
      EXPECT_EQ(touch(3, 3, read_a, read_b, Between::nothing), "");
    }
  }
  EXPECT_EQ(touch(3, 40, true, true, Between::nothing), "");
}

__global__ void unwritten_kernel(float* out) {
  __shared__ Shared<float, 4> numbers;
  if (blockIdx.x == 0) numbers[3] = 1;
  out[0] = numbers[3];
}
__global__ void past_the_end_kernel(int i) {
  __shared__ Shared<float, 4> numbers;
  numbers[i] = 1;
}

TEST(Device, NamesSharedMemoryThatNoOneWrote) {
  float out = 0;
  EXPECT_EQ(violation(0, unwritten_kernel, dim3(1), dim3(1), &out), "");
  // What an earlier block left behind does not count.
  expect_violation(violation(0, unwritten_kernel, dim3(2), dim3(1), &out),
                   {"block (1, 0, 0)", "reads element 3", "no one wrote"});
  expect_violation(violation(0, past_the_end_kernel, dim3(1), dim3(1), 4), {"element 4", "with 4"});
  expect_violation(violation(0, past_the_end_kernel, dim3(1), dim3(1), -1), {"element -1"});
}

__global__ void dynamic_kernel(float* out, int read) {
  DynamicShared<float> numbers;
  const int t = static_cast<int>(threadIdx.x);
  numbers[t] = static_cast<float>(t);
  __syncthreads();
  out[t] = numbers[read < 0 ? static_cast<int>(blockDim.x) - 1 - t : read];
}

TEST(Device, DynamicSharedMemory) {
  std::vector<float> out(64);
  EXPECT_EQ(violation(65 * 4, dynamic_kernel, dim3(2), dim3(64), out.data(), -1), "");
  EXPECT_EQ(out[0], 63.0f);
  expect_violation(violation(65 * 4, dynamic_kernel, dim3(1), dim3(64), out.data(), 64),
                   {"no one wrote"});
  expect_violation(violation(65 * 4, dynamic_kernel, dim3(1), dim3(64), out.data(), 65),
                   {"element 65 of shared memory with 65"});
}

__global__ void aligned_kernel(const char* p) {
  cuda::expect_aligned(p, 16);
}
__global__ void nothing_kernel() {}
__global__ void large_static_kernel() {
  __shared__ Shared<double, 6145> numbers;
  numbers[0] = 1;
}

TEST(Device, NamesAMisalignedVector) {
  alignas(16) const char bytes[32] = {};
  EXPECT_EQ(violation(0, aligned_kernel, dim3(1), dim3(1), &bytes[16]), "");
  expect_violation(violation(0, aligned_kernel, dim3(1), dim3(1), &bytes[8]), {"16 bytes"});
}

TEST(Device, HoldsTheLimitsOfAnArchitecture) {
  virtual_cuda::Device& device = virtual_cuda::device();
  const auto launched = [](dim3 grid, dim3 block, size_t shared) {
    return violation(shared, nothing_kernel, grid, block);
  };
  EXPECT_EQ(launched(dim3(1), dim3(1024), 0), "");
  expect_violation(launched(dim3(1), dim3(1025), 0), {"blocks of (1025, 1, 1) threads"});
  expect_violation(launched(dim3(1), dim3(1, 1, 65), 0), {"threads on sm_80"});
  expect_violation(launched(dim3(1, 65536), dim3(1), 0), {"a grid of (1, 65536, 1)"});
  expect_violation(launched(dim3(0), dim3(1), 0), {"a grid of (0, 1, 1)"});
  expect_violation(violation(0, large_static_kernel, dim3(1), dim3(1)), {"49160 bytes of static"});
  EXPECT_EQ(launched(dim3(1), dim3(1), 163 * 1024), "");
  expect_violation(launched(dim3(1), dim3(1), 164 * 1024), {"shared memory on sm_80"});
  device.set_limits(virtual_cuda::limits_of("sm_90"));
  EXPECT_EQ(launched(dim3(1), dim3(1), 164 * 1024), "");
  device.set_limits(virtual_cuda::limits_of("sm_75"));
  expect_violation(launched(dim3(1), dim3(1), 65 * 1024), {"on sm_75"});
  device.set_limits(virtual_cuda::limits_of("sm_80"));
  EXPECT_THROW(virtual_cuda::limits_of("sm_1"), std::invalid_argument);
}

constexpr unsigned kExchangeLine = __LINE__;
__global__ void exchange_kernel(int* out) {
  __shared__ Shared<int, 64> numbers;
  const int t = static_cast<int>(threadIdx.x);
  numbers[t] = t;
  __syncthreads();
  const int other = numbers[63 - t];
  out[t] = __shfl_xor_sync(kAll, other, 1);
}

// With nothing left out all is well under every order of lanes.
TEST(Device, LeavesOutOneWait) {
  virtual_cuda::Device& device = virtual_cuda::device();
  std::vector<int> out(64);
  const auto without = [&](unsigned line) {
    device.leave_out(virtual_cuda::Site{__FILE__, kExchangeLine + line});
    return violation(0, exchange_kernel, dim3(1), dim3(64), out.data());
  };
  expect_violation(without(5), {"reads element 63", "which no one wrote"});
  EXPECT_EQ(without(7), "");
  EXPECT_EQ(out[0], 63) << "a lane takes its own value";
  device.leave_out({});
  for (uint64_t seed = 0; seed < 20; ++seed) {
    device.set_seed(seed);
    run(exchange_kernel, dim3(1), dim3(64), out.data());
    for (int t = 0; t < 64; ++t) EXPECT_EQ(out[static_cast<size_t>(t)], 63 - (t ^ 1));
  }
  device.set_seed(0);
}

}  // namespace
}  // namespace shardrun
