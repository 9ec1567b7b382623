#include "tests/virtual_cuda/nvtx.h"

#include <nvtx3/nvToolsExt.h>

#include <utility>

static thread_local std::string ranges;

extern "C" int nvtxRangePushA(const char* message) {
  ranges.append(message).append("(");
  return 0;
}

extern "C" int nvtxRangePop() {
  ranges.append(")");
  return 0;
}

std::string shardrun::virtual_cuda::take_ranges() {
  return std::exchange(ranges, {});
}
