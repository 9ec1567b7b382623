// How the CPU kernels walk over tensors: in blocks of 1024 elements that are widened into a buffer
// on the stack, worked on in fp32, and rounded on the way out. The dtype is looked at once per
// block, so there is one copy of each kernel for all dtypes.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/table.h"
#include "kernels/math/convert.h"
#include "kernels/math/philox.h"

namespace shardrun::cpu::SHARDRUN_ISA {

inline constexpr int64_t kBlock = 1024;
inline constexpr int64_t kTaskElements = 32 * kBlock;  // enough work to be worth a wake-up

struct alignas(64) Buffer {
  float x[kBlock];
};

HD int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
HD int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}
HD int64_t quotient_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

HD void widen_many(float* out, const Bf16* in, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = math::widen(in[i]);
}

HD void widen_many(float* out, const Fp16* in, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
#pragma GCC ivdep
  for (int64_t k = i; k < n; ++k) out[k] = math::widen(in[k]);
}

HD void narrow_many(Bf16* out, const float* in, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) math::narrow(in[i], out[i]);
}

HD void narrow_many(Fp16* out, const float* in, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#pragma GCC ivdep
  for (int64_t k = i; k < n; ++k) math::narrow(in[k], out[k]);
}

// Elements [begin, begin + n) in fp32: in place, or in `buffer`.
inline const float* read(In in, int64_t begin, int64_t n, float* buffer) {
  switch (in.dtype) {
    case Dtype::bf16:
      widen_many(buffer, static_cast<const Bf16*>(in.data) + begin, n);
      return buffer;
    case Dtype::fp16:
      widen_many(buffer, static_cast<const Fp16*>(in.data) + begin, n);
      return buffer;
    default:
      return static_cast<const float*>(in.data) + begin;
  }
}

// Where results for [begin, ...) are formed: in place, or in `buffer` for write() to round.
HD float* place(Out out, int64_t begin, float* buffer) {
  return out.dtype == Dtype::fp32 ? static_cast<float*>(out.data) + begin : buffer;
}

inline void write(Out out, int64_t begin, const float* x, int64_t n) {
  switch (out.dtype) {
    case Dtype::bf16:
      return narrow_many(static_cast<Bf16*>(out.data) + begin, x, n);
    case Dtype::fp16:
      return narrow_many(static_cast<Fp16*>(out.data) + begin, x, n);
    default: {
      float* to = static_cast<float*>(out.data) + begin;
      if (to != x) __builtin_memmove(to, x, static_cast<size_t>(n) * sizeof(float));
    }
  }
}

HD float read_one(In in, int64_t i) {
  switch (in.dtype) {
    case Dtype::bf16:
      return math::widen(static_cast<const Bf16*>(in.data)[i]);
    case Dtype::fp16:
      return math::widen(static_cast<const Fp16*>(in.data)[i]);
    default:
      return static_cast<const float*>(in.data)[i];
  }
}

// Draws of elements [begin, begin + n), n at most a block; `out` has room for a block and 64 more.
// Returns where the first one is.
const uint32_t* draws(const RandomKey& key, int64_t begin, int64_t n, uint32_t* out);
struct alignas(64) DrawBuffer {
  uint32_t word[kBlock + 64];
};

template <typename Body>
inline void for_tasks(ThreadPool& pool, int64_t tasks, Body body) {
  if (tasks == 1) {
    body(int64_t{0}, 0);
  } else if (tasks > 1) {
    pool.run(tasks, body);
  }
}

// body(begin, n) for the blocks of [0, total).
template <typename Body>
inline void for_blocks(ThreadPool& pool, int64_t total, Body body) {
  for_tasks(pool, quotient_up(total, kTaskElements), [&](int64_t task, int) {
    const int64_t end = smaller(total, (task + 1) * kTaskElements);
    for (int64_t i = task * kTaskElements; i < end; i += kBlock) body(i, smaller(kBlock, end - i));
  });
}

// body(first row, last row + 1, thread).
template <typename Body>
inline void for_rows(ThreadPool& pool, int64_t rows, int64_t columns, Body body) {
  const int64_t per_task = larger(1, kTaskElements / larger(1, columns));
  for_tasks(pool, quotient_up(rows, per_task), [&](int64_t task, int thread) {
    body(task * per_task, smaller(rows, (task + 1) * per_task), thread);
  });
}

void fill_elementwise(Table& table);
void fill_norm(Table& table);
void fill_embedding(Table& table);
void fill_loss(Table& table);
void fill_reduce(Table& table);
void fill_adamw(Table& table);

}  // namespace shardrun::cpu::SHARDRUN_ISA
