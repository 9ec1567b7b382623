// What a failed launch throws; apart from the kernels, because nvcc cannot read the formatting
// library.
#include "runtime/error.h"

namespace shardrun::cuda {

[[noreturn]] void launch_failed(const char* kernel, int code, const char* text) {
  throw DeviceError("kernel {}: launch failed: {} (CUDA error {})", kernel, text, code);
}

}  // namespace shardrun::cuda
