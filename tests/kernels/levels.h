// Runs a kernel at every instruction-set level that this processor has, with 1, 2 and 3 threads,
// and holds that all give the same bits.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "runtime/stream.h"
#include "tests/kernels/reference.h"

namespace shardrun {

inline constexpr Dtype kFloating[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16};

// Nothing, one, primes, the edges of lanes, chunks and tasks.
inline constexpr int64_t kSizes[] = {0, 1, 7, 31, 32, 257, 1023, 1024, 1025, 4099, 32768, 70001};

// `run(stream)` returns its outputs as a vector of Arrays; the answer is that of the first setting.
template <typename Run>
std::vector<Array> same_everywhere(Run run) {
  flush_denormals_on_this_thread();
  std::vector<Array> first;
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (isa > detect_isa()) continue;
    for (int threads : {1, 2, 3}) {
      ThreadPool pool(threads);
      Stream stream(DeviceKind::cpu, isa, &pool);
      std::vector<Array> outputs = run(stream);
      if (first.empty()) {
        first = std::move(outputs);
        continue;
      }
      for (size_t i = 0; i < outputs.size(); ++i) {
        EXPECT_TRUE(outputs[i].same_bits(first[i]))
            << "output " << i << " at " << name_of(isa) << " with " << threads << " threads";
      }
    }
  }
  return first;
}

// One thread, the best level.
class Runner {
 public:
  Runner() : pool_(1), stream_(DeviceKind::cpu, detect_isa(), &pool_) {
    flush_denormals_on_this_thread();
  }
  Stream& stream() { return stream_; }

 private:
  ThreadPool pool_;
  Stream stream_;
};

// |got - want| <= relative * (|want| + scale) with the roundoff of the dtype added.
inline void expect_close(double got, double want, Dtype dtype, double relative, double scale,
                         int64_t i) {
  const double tiny = dtype == Dtype::fp16 ? 0x1p-25 : 0x1p-126;
  const double bound =
      (unit_roundoff(dtype) * 1.0001 + relative) * std::abs(want) + relative * scale + tiny;
  EXPECT_LE(std::abs(got - want), bound) << "element " << i << " got " << got << " want " << want;
}

}  // namespace shardrun
