// Every CUDA kernel, run on the virtual device, against the CPU kernel: the same bits, of the cases
// in tests/kernels/gpu_cases.h.
#include <gtest/gtest.h>

#include "tests/kernels/gpu_cases.h"
#include "tests/virtual_cuda/device.h"
#include "tests/virtual_cuda/host_device.h"

namespace shardrun {
namespace {

TEST(VirtualCuda, Elementwise) {
  HostDevice device;
  expect_same_bits(elementwise_cases(), device);
}
TEST(VirtualCuda, Norm) {
  HostDevice device;
  expect_same_bits(norm_cases(), device);
}
TEST(VirtualCuda, Reduce) {
  HostDevice device;
  expect_same_bits(reduce_cases(), device);
}
TEST(VirtualCuda, Adamw) {
  HostDevice device;
  expect_same_bits(adamw_cases(), device);
}
TEST(VirtualCuda, Embedding) {
  HostDevice device;
  expect_same_bits(embedding_cases(), device);
}
TEST(VirtualCuda, Loss) {
  HostDevice device;
  expect_same_bits(loss_cases(), device);
}

}  // namespace
}  // namespace shardrun
