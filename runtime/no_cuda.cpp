// Stands in for runtime/cuda/ where CUDA was not built.
#include "runtime/device.h"
#include "runtime/range.h"

namespace shardrun {

int cuda_device_count() {
  return 0;
}

std::string cuda_unavailable() {
  return "this build has no CUDA; configure with -DSHARDRUN_CUDA=ON where nvcc is";
}

std::unique_ptr<Device> make_cuda_device(int) {
  throw DeviceError("{}", cuda_unavailable());
}

void push_range(const char*) {}
void pop_range() {}

}  // namespace shardrun
