// The one way to start a kernel, and what kernels use beyond plain CUDA. A kernel is started by a
// function call, not by <<< >>>, and shared memory is read and written through accessors, so that a
// host compiler can take the same source: tests/virtual_cuda/ then stands in for the toolkit's
// header and watches each access.
#pragma once

#ifndef SHARDRUN_VIRTUAL_CUDA
#include <cuda_runtime.h>
#endif

#include "kernels/cuda/kernels.h"

namespace shardrun::cuda {

struct Launch {
  const char* kernel;  // for messages
  dim3 grid;
  dim3 block;
  StreamHandle stream;
  size_t shared_bytes = 0;  // dynamic
};

#ifndef SHARDRUN_VIRTUAL_CUDA

// Throws DeviceError; `code` is a cudaError_t.
[[noreturn]] void launch_failed(const char* kernel, int code, const char* text);

template <typename... Parameters>
void start(const Launch& launch, void (*kernel)(Parameters...), Parameters... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  cudaError_t error = cudaSuccess;
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (launch.shared_bytes > kWithoutAsking) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(launch.shared_bytes));
  }
  if (error == cudaSuccess) {
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
  }
  if (error != cudaSuccess) launch_failed(launch.kernel, error, cudaGetErrorString(error));
}

// `__shared__ Shared<float, 8> sums;`, then sums[i] as with an array.
template <typename T, int kCount>
struct Shared {
  T element[kCount];
  __device__ T& operator[](int i) { return element[i]; }
  __device__ const T& operator[](int i) const { return element[i]; }
};

// The dynamic shared memory of a launch as elements of one type.
template <typename T>
struct DynamicShared {
  __device__ T& operator[](int i) const {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<T*>(memory)[i];
  }
};

// Before an access of `bytes` at once.
__device__ __forceinline__ void expect_aligned(const void*, size_t) {}

#endif

template <typename... Parameters, typename... Arguments>
void launch(const Launch& launch, void (*kernel)(Parameters...), Arguments... arguments) {
  start<Parameters...>(launch, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace shardrun::cuda
