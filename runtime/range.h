// Names a stretch of what a rank's host gives its device, for profilers: an NVTX range where CUDA is
// built (runtime/cuda/range.cpp; Nsight Systems shows them above the streams), nothing elsewhere.
#pragma once

namespace shardrun {

void push_range(const char* name);  // of this thread; they nest
void pop_range();

class Range {
 public:
  explicit Range(const char* name) { push_range(name); }
  ~Range() { pop_range(); }
  Range(const Range&) = delete;
};

}  // namespace shardrun
