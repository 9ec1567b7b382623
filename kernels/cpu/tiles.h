// The loops of matmul and attention that are not matrix products, over rows in fp32. Compiled once
// per instruction set (tiles.cpp); tiles_of picks a copy. Called by one thread on its own tile.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/random.h"
#include "runtime/stream.h"

namespace shardrun::cpu {

// Dropout of one row of probabilities: the draw of column j is element first + j of the key, the
// probability is kept when the draw is >= threshold, and then multiplied by keep_scale.
struct RowDropout {
  RandomKey key;
  uint64_t first = 0;
  uint32_t threshold = 0;  // 0: no dropout
  float keep_scale = 1;
};

struct Tiles {
  // Between fp32 and any compute dtype, rounding to nearest even.
  void (*widen)(float* out, const void* in, Dtype dtype, int64_t count);
  void (*narrow)(void* out, const float* in, Dtype dtype, int64_t count);

  void (*add)(float* to, const float* from, int64_t count);

  // scores -> softmax(scores * scale) over the first `valid` columns (>= 1), with dropout, and zero
  // in the others. Returns the log of the sum of exponentials.
  float (*softmax_row)(float* scores, int64_t valid, int64_t columns, float scale,
                       const RowDropout& dropout);

  // With P = exp(scores * scale - lse) and the mask M of dropout (0 or keep_scale):
  // scores -> P M, dprobs -> scale P (dprobs M - delta); zero beyond the valid columns.
  void (*softmax_backward_row)(float* scores, float* dprobs, int64_t valid, int64_t columns,
                               float scale, float lse, float delta, const RowDropout& dropout);

  float (*dot)(const float* a, const float* b, int64_t count);
};

namespace base {
extern const Tiles kTiles;
}
namespace avx2 {
extern const Tiles kTiles;
}
namespace avx512 {
extern const Tiles kTiles;
}

inline const Tiles& tiles_of(Isa isa) {
  if (isa >= Isa::avx512) return avx512::kTiles;
  return isa == Isa::avx2 ? avx2::kTiles : base::kTiles;
}

}  // namespace shardrun::cpu
