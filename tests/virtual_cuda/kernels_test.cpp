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

// Each barrier of each kernel is needed: without it a case fails or gives other bits.
TEST(VirtualCuda, EveryBarrierIsNeeded) {
  HostDevice host;
  virtual_cuda::Device& device = virtual_cuda::device();
  std::vector<KernelCase> cases;
  for (auto make :
       {elementwise_cases, norm_cases, reduce_cases, adamw_cases, embedding_cases, loss_cases}) {
    for (KernelCase& c : make()) {
      const int64_t before = device.waits();
      run_on_gpu(c, host);
      if (device.waits() > before) cases.push_back(std::move(c));
    }
  }
  const std::set<virtual_cuda::Site> barriers = device.sites();
  EXPECT_GE(barriers.size(), 8u);
  for (const virtual_cuda::Site& site : barriers) {
    device.leave_out(site);
    bool noticed = false;
    for (size_t i = 0; i < cases.size() && !noticed; ++i) {
      try {
        noticed = !same_bits(run_on_gpu(cases[i], host), run_on_cpu(cases[i]));
      } catch (const virtual_cuda::Violation&) {
        noticed = true;
      }
    }
    device.leave_out({});
    EXPECT_TRUE(noticed) << "nothing misses the barrier at " << site.file << ":" << site.line;
  }
}

}  // namespace
}  // namespace shardrun
