// Folding leaves, and squares for the norm of the gradient.
#include "kernels/cpu/lanes.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

constexpr uint32_t kExponent = 0x7f800000u;

HD bool not_finite(float x) {
  return (math::bits_of(x) & kExponent) == kExponent;
}

// Adds (or assigns) a block; true when all sums are finite.
template <bool kAdd>
HD bool fold_block(float* accumulator, const float* x, int64_t n) {
  uint32_t worst = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float sum = kAdd ? accumulator[i] + x[i] : math::flush(x[i]);
    accumulator[i] = sum;
    const uint32_t exponent = math::bits_of(sum) & kExponent;
    worst = worst > exponent ? worst : exponent;
  }
  return worst != kExponent;
}

// The first place; its kind is the leaf's where the leaf is to blame, else the sum's.
int64_t locate(const float* accumulator, const float* x, int64_t begin, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!not_finite(accumulator[i])) continue;
    const float culprit = not_finite(x[i]) ? x[i] : accumulator[i];
    return 2 * (begin + i) + (culprit != culprit ? 1 : 0);
  }
  return INT64_MAX;
}

void fold(float* accumulator, In leaf, bool add, int64_t n, int64_t* found, int64_t tag,
          ThreadPool& pool) {
  for_tasks(pool, quotient_up(n, kTaskElements), [&](int64_t task, int) {
    Buffer buffer;
    int64_t first = INT64_MAX;
    const int64_t end = smaller(n, (task + 1) * kTaskElements);
    for (int64_t i = task * kTaskElements; i < end; i += kBlock) {
      const int64_t m = smaller(kBlock, end - i);
      const float* x = read(leaf, i, m, buffer.x);
      float* sum = accumulator + i;
      const bool finite = add ? fold_block<true>(sum, x, m) : fold_block<false>(sum, x, m);
      if (!finite) [[unlikely]]
        first = smaller(first, locate(sum, x, i, m));
    }
    if (first == INT64_MAX) return;
    // The smallest of all tasks, whatever the order in which they end.
    const int64_t place = tag + first;
    int64_t seen = __atomic_load_n(found, __ATOMIC_RELAXED);
    while (place < seen && !__atomic_compare_exchange_n(found, &seen, place, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
    }
  });
}

void block_squares(double* squares, const float* gradient, int64_t blocks, ThreadPool& pool) {
  constexpr int64_t kSize = 256;
  constexpr int64_t kBlocksPerTask = kTaskElements / kSize;
  for_tasks(pool, quotient_up(blocks, kBlocksPerTask), [&](int64_t task, int) {
    const int64_t end = smaller(blocks, (task + 1) * kBlocksPerTask);
    for (int64_t block = task * kBlocksPerTask; block < end; ++block) {
      const float* x = gradient + block * kSize;
      alignas(64) double lanes[kLanes] = {};
      for (int64_t i = 0; i < kSize; i += kLanes) {
#pragma GCC ivdep
        for (int j = 0; j < kLanes; ++j) {
          const double g = static_cast<double>(x[i + j]);
          lanes[j] += g * g;
        }
      }
      squares[block] = combine_lanes(lanes);
    }
  });
}

}  // namespace

void fill_reduce(Table& table) {
  table.fold = fold;
  table.block_squares = block_squares;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
