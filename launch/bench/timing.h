// Times, and the limits that measurements are held against. Called by the benches of one device.
#pragma once

#include "launch/bench/bench.h"
#include "launch/train/rank_device.h"

namespace shardrun {

double median(std::vector<double> values);

// Seconds of one call by the stream's own clock, events on a GPU: the median of several rounds, each
// of as many calls as a clock needs, after one that nobody times.
double time_of(Stream& stream, FunctionRef<void()> call);

// The same with what the call was counted to do.
struct Measured {
  double seconds = 0;
  WorkCount work;  // of one call
};
Measured measure(Stream& stream, FunctionRef<void()> call);

// Bytes read and written each second by the plainest copy: the library's on a GPU, memcpy by all
// threads on a CPU.
double copy_bandwidth(size_t bytes, Memory& memory, Stream& stream);

// FLOP/s of the library on the square product that takes about as much work as `flops`.
struct Peak {
  int64_t size = 0;
  double flops_per_second = 0;
};
Peak matmul_peak(double flops, Dtype dtype, Memory& memory, Stream& stream);

// Normal numbers: zeros are faster to multiply, and nobody trains on them.
OwnedTensor random_tensor(Memory& memory, Dtype dtype, const Shape& shape, Stream& stream);
OwnedTensor random_tokens(Memory& memory, const Shape& shape, int64_t vocabulary, Stream& stream);

// UsageError on every rank where there are several.
void require_one_rank(const char* bench, RankContext& ranks);

}  // namespace shardrun
