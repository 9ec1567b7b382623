// NVTX that is none: the ranges of each thread, for tests.
#pragma once

#include <string>

namespace shardrun::virtual_cuda {

// What this thread has named since it was last asked, in order: "name(" where a range begins, ")" where
// it ends.
std::string take_ranges();

}  // namespace shardrun::virtual_cuda
