// Row loops of matmul and attention, compiled once per instruction set. Maxima and sums run in the
// lanes of kernels/cpu/lanes.h, so every copy gives the same bits.
#include "kernels/cpu/tiles.h"

#include "kernels/cpu/block.h"
#include "kernels/cpu/lanes.h"
#include "kernels/math/functions.h"

namespace shardrun::cpu::SHARDRUN_ISA {
namespace {

void widen(float* out, const void* in, Dtype dtype, int64_t count) {
  const float* from = read({in, dtype}, 0, count, out);
  if (from != out) __builtin_memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
}

void narrow(void* out, const float* in, Dtype dtype, int64_t count) {
  write({out, dtype}, 0, in, count);
}

void add(float* __restrict to, const float* __restrict from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// The largest of count >= 1 numbers. A NaN may be passed over: the exponentials bring it back.
float row_max(const float* x, int64_t count) {
  float top = x[0];
  int64_t i = 0;
  if (count >= kWidth) {
    Vec v = load(x);
    for (i = kWidth; i + kWidth <= count; i += kWidth) {
      const Vec next = load(x + i);
      v = next > v ? next : v;
    }
    for (int k = 0; k < kWidth; ++k) top = v[k] > top ? v[k] : top;
  }
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

void zero(float* begin, float* end) {
  __builtin_memset(begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
}

// Calls body(begin, mask, n) over [0, count): mask[j] is the factor of column begin + j.
template <typename Body>
HD void with_mask(const RowDropout& dropout, int64_t count, Body body) {
  DrawBuffer words;
  Buffer mask;
  const uint32_t threshold =
      dropout.threshold;  // in registers, or the loop below is not vector code
  const float keep_scale = dropout.keep_scale;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = smaller(kBlock, count - begin);
    const uint32_t* draw =
        draws(dropout.key, static_cast<int64_t>(dropout.first) + begin, n, words.word);
    for (int64_t j = 0; j < n; ++j) {
      mask.x[j] = draw[j] >= threshold ? keep_scale : 0.0f;
    }
    body(begin, mask.x, n);
  }
}

float softmax_row(float* s, int64_t valid, int64_t columns, float scale,
                  const RowDropout& dropout) {
  const float top = row_max(s, valid) * scale;
  for (int64_t j = 0; j < valid; ++j) s[j] = math::exp(s[j] * scale - top);
  const float sum = row_sum(s, s, valid, [](auto x, auto) { return x; });
  const float inverse = 1.0f / sum;
  if (dropout.threshold == 0) {
    for (int64_t j = 0; j < valid; ++j) s[j] *= inverse;
  } else {
    with_mask(dropout, valid, [=](int64_t begin, const float* mask, int64_t n) {
      for (int64_t j = 0; j < n; ++j) s[begin + j] *= inverse * mask[j];
    });
  }
  zero(s + valid, s + columns);
  return top + math::log(sum);
}

void softmax_backward_row(float* __restrict s, float* __restrict dp, int64_t valid, int64_t columns,
                          float scale, float lse, float delta, const RowDropout& dropout) {
  if (dropout.threshold == 0) {
    for (int64_t j = 0; j < valid; ++j) {
      s[j] = math::exp(s[j] * scale - lse);
      dp[j] = scale * (s[j] * (dp[j] - delta));
    }
  } else {
    for (int64_t j = 0; j < valid; ++j) s[j] = math::exp(s[j] * scale - lse);
    with_mask(dropout, valid, [=](int64_t begin, const float* mask, int64_t n) {
      for (int64_t j = 0; j < n; ++j) {
        const float p = s[begin + j];
        dp[begin + j] = scale * (p * (dp[begin + j] * mask[j] - delta));
        s[begin + j] = p * mask[j];
      }
    });
  }
  zero(s + valid, s + columns);
  zero(dp + valid, dp + columns);
}

float dot(const float* a, const float* b, int64_t count) {
  return row_sum(a, b, count, [](auto x, auto y) { return x * y; });
}

}  // namespace

const Tiles kTiles = {widen, narrow, add, softmax_row, softmax_backward_row, dot};

}  // namespace shardrun::cpu::SHARDRUN_ISA
