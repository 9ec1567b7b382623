// What every call of the CUDA runtime goes through.
#pragma once

#include <cuda_runtime.h>

#include "runtime/error.h"

namespace shardrun::cuda {

// CHECK_CUDA(cudaStreamSynchronize(stream)) throws DeviceError with the call's name and the
// library's text.
inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // A failed call also leaves its error behind for whoever asks next; that one is answered here.
  cudaGetLastError();
  throw DeviceError("{}: {} ({})", std::string(call).substr(0, std::string(call).find('(')),
                    cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace shardrun::cuda

#define SHARDRUN_CHECK_CUDA(call) ::shardrun::cuda::check((call), #call)
