// What the program says of GPUs where it was built with CUDA: needs the toolkit, and no GPU.
#include <gtest/gtest.h>

#include <fstream>

#include "kernels/matmul.h"
#include "runtime/device.h"

namespace shardrun {
namespace {

bool is_loaded(const std::string& library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(library) != std::string::npos) return true;
  }
  return false;
}

// It is half a gigabyte, which a run on CPUs should not pay for.
TEST(CudaLibraries, CublasIsLoadedWhenFirstNeeded) {
  EXPECT_FALSE(is_loaded("libcublasLt"));
  EXPECT_EQ(kernels::matmul_library(DeviceKind::cuda).rfind("cuBLASLt-1", 0), 0u);
  EXPECT_TRUE(is_loaded("libcublasLt"));
}

TEST(CudaLibraries, WithoutAGpuTheReasonIsTold) {
  if (cuda_device_count() > 0) {
    EXPECT_EQ(cuda_unavailable(), "");
    return;
  }
  const std::string reason = cuda_unavailable();
  EXPECT_NE(reason, "");
  try {
    make_cuda_device(0);
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.what(), "no GPU: " + reason);
  }
}

}  // namespace
}  // namespace shardrun
