// Sums over a row in the order that all devices share: element i of a chunk of 1024 goes to lane
// i mod 32, lanes are added with distances 16, 8, 4, 2, 1, chunks left to right.
#pragma once

#include "kernels/cpu/block.h"

namespace shardrun::cpu::SHARDRUN_ISA {

inline constexpr int kLanes = 32;

// The widest vectors of the instruction set, so that the 32 lanes stay in registers.
#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
#elif defined(__AVX2__)
inline constexpr int kWidth = 8;
#else
inline constexpr int kWidth = 4;
#endif
typedef float Vec __attribute__((vector_size(kWidth * sizeof(float))));

HD Vec load(const float* x) {
  Vec v;
  __builtin_memcpy(&v, x, sizeof v);
  return v;
}

template <typename T>
HD T combine_lanes(T* lanes) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int j = 0; j < distance; ++j) lanes[j] += lanes[j + distance];
  }
  return lanes[0];
}

// Sum over i of f(a[i], b[i]); f takes floats and Vecs alike.
template <typename F>
HD float row_sum(const float* a, const float* b, int64_t n, F f) {
  float total = 0;
  for (int64_t chunk = 0; chunk < n; chunk += kBlock) {
    const float* x = a + chunk;
    const float* y = b + chunk;
    const int64_t m = smaller(kBlock, n - chunk);
    Vec v[kLanes / kWidth] = {};
    int64_t i = 0;
    for (; i + kLanes <= m; i += kLanes) {
#pragma GCC unroll 8
      for (int k = 0; k < kLanes / kWidth; ++k) {
        v[k] += f(load(x + i + k * kWidth), load(y + i + k * kWidth));
      }
    }
    alignas(64) float lanes[kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < kLanes / kWidth; ++k) {
      __builtin_memcpy(lanes + k * kWidth, &v[k], sizeof(Vec));
    }
    for (int j = 0; i < m; ++i, ++j) lanes[j] += f(x[i], y[i]);
    total += combine_lanes(lanes);
  }
  return total;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
