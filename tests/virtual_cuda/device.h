// A CUDA device that is none: the test instrument that runs the kernels of kernels/cuda/ where
// there is no GPU. It is included by force before each .cu file that the host compiler takes, and
// by tests. The blocks of a launch run one after another, the threads of a block as fibers that
// change places at barriers and warp operations only: one warp runs until all its lanes have left or
// stand at the block's next barrier, then another; which, and which lane goes first, is drawn from the
// seed. What real hardware would let pass or hang on is an error that names kernel, block and thread:
//
//   - a barrier that not all threads of the block reach, or not the same one
//   - a shuffle or vote that not all lanes of its mask reach, or that reads a lane not in the mask
//   - shared memory read where no one wrote it, past its end, or touched by two threads without a
//     barrier between them
//   - a vector access that is not aligned; a launch past the limits of the architecture
//
// Out-of-bounds accesses to global memory are the address sanitizer's to find. It proves indices
// and barriers; about speed it says nothing.
#pragma once

#include <math.h>  // fmaf, without a namespace

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// ---- The language.
#define SHARDRUN_VIRTUAL_CUDA
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // one block at a time; Shared<T> knows which block wrote
#define __grid_constant__
#define __launch_bounds__(...)

struct CUstream_st;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

// ---- The device.
namespace shardrun::virtual_cuda {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Limits {
  const char* architecture;
  unsigned threads;  // of a block
  unsigned block_x, block_y, block_z;
  unsigned grid_x, grid_y, grid_z;
  size_t shared;  // of a block: static, and dynamic that was asked for
  size_t static_shared;
};
// "sm_70", "sm_75", "sm_80", "sm_90" or "sm_100" (CUDA C++ Programming Guide, technical
// specifications per compute capability).
Limits limits_of(const std::string& architecture);

// Where the source waits: a barrier of the block, or a warp operation, which waits for its lanes.
struct Site {
  std::string_view file;  // the compiler's, for ever
  unsigned line;
  auto operator<=>(const Site&) const = default;
};

enum class WarpOp : uint8_t {
  shuffle_xor,
  shuffle_down,
  shuffle_up,
  shuffle_index,
  ballot,
  sync,
  exchange
};
enum class Vote : uint8_t { none, any, all, count };

class Device {
 public:
  Device();
  ~Device();
  Device(const Device&) = delete;

  // ---- For tests.
  void set_limits(const Limits& limits) { limits_ = limits; }
  void set_seed(uint64_t seed) { draw_ = seed; }
  // A wait that is left out from now on: no one waits there, and each lane of a warp takes its own
  // value for the others'. Sites met are listed; sites.h has the environment variables.
  void leave_out(std::optional<Site> site) { left_out_ = site; }

  // ---- For kernels and launch().
  void check_launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes) const;
  void run(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes,
           const std::function<void()>& body);
  int barrier(Vote vote, bool value, const std::source_location& at);
  uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width,
                const std::source_location& at);
  // All 32 lanes of a warp hand in a pointer each; when the last has come, run(pointers) is called
  // once, and then all go on.
  using Exchange = void (*)(void* const* lanes);
  void exchange(void* mine, Exchange run, const std::source_location& at);
  int lane() const { return current_ % 32; }
  [[noreturn]] void fail(const std::string& what) const;
  size_t dynamic_shared_bytes() const { return dynamic_bytes_; }
  void* dynamic_shared() { return dynamic_.data(); }

  // What is remembered of an element of shared memory.
  struct Touched {
    uint64_t block = 0;  // serial number of the block whose content this is; 0: none
    int writer = 0;
    uint64_t write_epoch = 0, write_warp_epoch = 0;
    int reader = -1;
    bool many_warps = false, many_readers = false;
    uint64_t read_epoch = 0, read_warp_epoch = 0;
  };
  void on_read(Touched& touched, int index);
  void on_write(Touched& touched, int index);
  // A variable in shared memory that a block begins to use.
  void count_static_shared(uint64_t& seen_in, size_t bytes);
  void check_index(int index, int64_t count) const;
  std::vector<Touched>& dynamic_map(size_t elements);

 private:
  struct Fiber;
  struct Stacks;
  static void enter();
  void run_block();
  void run_warp(int warp);
  void wait();
  int next_of_warp();
  void go(Fiber& from, int to);
  void arrive(void* fake_stack);
  bool release_warp();
  void run_exchange(int first);
  bool release_barrier();
  void note(const std::source_location& at);
  bool is_left_out(const std::source_location& at) const {
    return left_out_ && left_out_->line == at.line() && left_out_->file == at.file_name();
  }
  uint64_t draw();
  [[noreturn]] void fail_stuck();
  [[noreturn]] void fail_at(int thread, const std::string& what) const;
  dim3 index_of(int thread) const;
  int threads() const { return static_cast<int>(blockDim.x * blockDim.y * blockDim.z); }

  Limits limits_;
  std::set<Site> sites_;
  Site noted_{};  // last
  std::optional<Site> left_out_;
  uint64_t draw_ = 0;  // 0: in order

  const char* kernel_ = "";
  const std::function<void()>* body_ = nullptr;
  std::unique_ptr<Stacks> stacks_;
  std::vector<Fiber> fibers_;
  std::vector<dim3> index_;  // of each thread
  int current_ = -1;
  unsigned ready_ = 0;  // lanes of the warp that runs
  int first_ = 0;       // the lane that goes first
  uint64_t block_serial_ = 0;
  uint64_t epoch_ = 0;  // barriers that the block has passed
  std::vector<uint64_t> warp_epoch_;
  size_t static_bytes_ = 0;
  size_t dynamic_bytes_ = 0;
  std::vector<unsigned char> dynamic_;
  std::vector<Touched> dynamic_touched_;
  uint64_t dynamic_block_ = 0;
};

inline Device& device() {
  static Device device;
  return device;
}

// Of runtime.cpp. `run` runs later, in the order of the stream; a device that is broken throws.
void submit_kernel(CUstream_st* stream, const char* kernel, std::function<void()> run);
// Throws unless `data` is in device or pinned memory.
void check_argument(const char* kernel, const void* data);
// Throws where a word of a kernel's argument points to other memory of this process.
void check_words(const char* kernel, const void* argument, size_t bytes);

// A pointer, a tensor's, or those of a structure.
template <typename T>
void check_argument_of(const char* kernel, const T& argument) {
  if constexpr (std::is_pointer_v<T>) {
    if (argument) check_argument(kernel, argument);
  } else if constexpr (requires { static_cast<const void*>(argument.data); }) {
    if (argument.data) check_argument(kernel, argument.data);
  } else if constexpr (std::is_class_v<T>) {
    check_words(kernel, &argument, sizeof argument);
  }
}

template <typename T>
uint64_t pack(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What shared[i] is: reading and writing go past the device.
template <typename T>
class Element {
 public:
  Element(T& value, Device::Touched& touched, int index)
      : value_(value), touched_(touched), index_(index) {}
  operator T() const {
    device().on_read(touched_, index_);
    return value_;
  }
  T operator=(T value) {
    device().on_write(touched_, index_);
    return value_ = value;
  }
  T operator=(const Element& other) { return *this = static_cast<T>(other); }
  T operator+=(T value) { return *this = static_cast<T>(*this) + value; }

 private:
  T& value_;
  Device::Touched& touched_;
  int index_;
};

}  // namespace shardrun::virtual_cuda

// ---- What kernels call.
inline void __syncthreads(std::source_location at = std::source_location::current()) {
  shardrun::virtual_cuda::device().barrier(shardrun::virtual_cuda::Vote::none, false, at);
}
inline int __syncthreads_or(int value, std::source_location at = std::source_location::current()) {
  return shardrun::virtual_cuda::device().barrier(shardrun::virtual_cuda::Vote::any, value != 0,
                                                  at);
}
inline int __syncthreads_and(int value, std::source_location at = std::source_location::current()) {
  return shardrun::virtual_cuda::device().barrier(shardrun::virtual_cuda::Vote::all, value != 0,
                                                  at);
}
inline int __syncthreads_count(int value,
                               std::source_location at = std::source_location::current()) {
  return shardrun::virtual_cuda::device().barrier(shardrun::virtual_cuda::Vote::count, value != 0,
                                                  at);
}

#define SHARDRUN_SHUFFLE(name, op)                                                  \
  template <typename T>                                                             \
  T name(unsigned mask, T value, int argument, int width = 32,                      \
         std::source_location at = std::source_location::current()) {               \
    return shardrun::virtual_cuda::unpack<T>(shardrun::virtual_cuda::device().warp( \
        op, mask, shardrun::virtual_cuda::pack(value), argument, width, at));       \
  }
SHARDRUN_SHUFFLE(__shfl_xor_sync, shardrun::virtual_cuda::WarpOp::shuffle_xor)
SHARDRUN_SHUFFLE(__shfl_down_sync, shardrun::virtual_cuda::WarpOp::shuffle_down)
SHARDRUN_SHUFFLE(__shfl_up_sync, shardrun::virtual_cuda::WarpOp::shuffle_up)
SHARDRUN_SHUFFLE(__shfl_sync, shardrun::virtual_cuda::WarpOp::shuffle_index)
#undef SHARDRUN_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int value,
                              std::source_location at = std::source_location::current()) {
  return static_cast<unsigned>(shardrun::virtual_cuda::device().warp(
      shardrun::virtual_cuda::WarpOp::ballot, mask, value != 0, 0, 32, at));
}
inline int __any_sync(unsigned mask, int value,
                      std::source_location at = std::source_location::current()) {
  return __ballot_sync(mask, value, at) != 0;
}
inline int __all_sync(unsigned mask, int value,
                      std::source_location at = std::source_location::current()) {
  return __ballot_sync(mask, value, at) == mask;
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       std::source_location at = std::source_location::current()) {
  shardrun::virtual_cuda::device().warp(shardrun::virtual_cuda::WarpOp::sync, mask, 0, 0, 32, at);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline long long atomicMin(long long* at, long long value) {
  const long long before = *at;
  *at = value < before ? value : before;
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at = before + value;
  return before;
}

namespace shardrun::cuda {

inline void expect_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    virtual_cuda::device().fail("an access of " + std::to_string(bytes) +
                                " bytes is not aligned to them");
  }
}

// `Launch` is that of kernels/cuda/launch.h, which comes later. Without a stream the kernel has run
// when this returns and may be given any memory: tests of kernels alone want no more.
template <typename... Parameters, typename Launch>
void start(const Launch& launch, void (*kernel)(Parameters...), Parameters... arguments) {
  virtual_cuda::Device& device = virtual_cuda::device();
  if (!launch.stream) {
    device.run(launch.kernel, launch.grid, launch.block, launch.shared_bytes,
               [&] { kernel(arguments...); });
    return;
  }
  device.check_launch(launch.kernel, launch.grid, launch.block, launch.shared_bytes);
  (virtual_cuda::check_argument_of(launch.kernel, arguments), ...);
  virtual_cuda::submit_kernel(launch.stream, launch.kernel, [=, &device] {
    device.run(launch.kernel, launch.grid, launch.block, launch.shared_bytes,
               [&] { kernel(arguments...); });
  });
}

template <typename T, int kCount>
class Shared {
 public:
  virtual_cuda::Element<T> operator[](int i) {
    virtual_cuda::Device& device = virtual_cuda::device();
    device.check_index(i, kCount);
    device.count_static_shared(seen_in_, sizeof(T) * kCount);
    const size_t at = static_cast<size_t>(i);
    return {element_[at], touched_[at], i};
  }

 private:
  std::array<T, kCount> element_{};
  std::array<virtual_cuda::Device::Touched, kCount> touched_{};
  uint64_t seen_in_ = 0;
};

// The dynamic shared memory of a launch as elements of one type.
template <typename T>
class DynamicShared {
 public:
  virtual_cuda::Element<T> operator[](int i) {
    virtual_cuda::Device& device = virtual_cuda::device();
    const size_t count = device.dynamic_shared_bytes() / sizeof(T);
    device.check_index(i, static_cast<int64_t>(count));
    return {static_cast<T*>(device.dynamic_shared())[i],
            device.dynamic_map(count)[static_cast<size_t>(i)], i};
  }
  // Elements i .. i + 3 in one access.
  void store_vector(int i, uint4 v) {
    if (i % 4 != 0) virtual_cuda::device().fail("a vector in shared memory is not aligned");
    const T elements[] = {v.x, v.y, v.z, v.w};
    for (int k = 0; k < 4; ++k) (*this)[i + k] = elements[k];
  }
};

}  // namespace shardrun::cuda

#include "tests/virtual_cuda/tensor_core.h"  // needs the device
