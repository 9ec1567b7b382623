// Apart from launch.h, whose includers are compiled by nvcc, which this header's library does not suit.
#include "runtime/error.h"

namespace shardrun::cuda {

[[noreturn]] void launch_failed(const char* kernel, int code, const char* text) {
  throw DeviceError("kernel {}: launch failed: {} (CUDA error {})", kernel, text, code);
}

}  // namespace shardrun::cuda
