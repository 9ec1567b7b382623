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

// [Note: conversions by intrinsics] Where the instruction set has them, conversions are written
// out; they give the bits of the functors in kernels/math/convert.h, which tests hold for all
// inputs. With AVX-512 a mask serves the end of a row, else the functors do.
#if defined(__AVX512F__)

HD __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << n) - 1u);
}

HD void widen_many(float* out, const Bf16* in, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    __m512i x =
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, in + i)), 16);
    const __mmask16 small = _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x7f800000));
    x = _mm512_mask_and_epi32(x, small, x, _mm512_set1_epi32(INT32_MIN));
    _mm512_mask_storeu_ps(out + i, lanes, _mm512_castsi512_ps(x));
  }
}

HD void narrow_many(Bf16* out, const float* in, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512 f = _mm512_maskz_loadu_ps(lanes, in + i);
    __m512i x = _mm512_castps_si512(f);
    const __mmask16 small = _mm512_testn_epi32_mask(x, _mm512_set1_epi32(0x7f800000));
    x = _mm512_mask_and_epi32(x, small, x, _mm512_set1_epi32(INT32_MIN));
    const __m512i high = _mm512_srli_epi32(x, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i raised = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q);
    const __m512i y = _mm512_mask_mov_epi32(_mm512_srli_epi32(raised, 16), nan, quiet);
    _mm256_mask_storeu_epi16(out + i, lanes, _mm512_cvtepi32_epi16(y));
  }
}

HD void widen_many(float* out, const Fp16* in, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    _mm512_mask_storeu_ps(out + i, lanes, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, in + i)));
  }
}

HD void narrow_many(Fp16* out, const float* in, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    _mm256_mask_storeu_epi16(out + i, lanes,
                             _mm512_cvtps_ph(_mm512_maskz_loadu_ps(lanes, in + i),
                                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

#else

HD void widen_many(float* out, const Bf16* in, int64_t n) {
  int64_t i = 0;
#ifdef __AVX2__
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const __m256i sign = _mm256_set1_epi32(INT32_MIN);
  for (; i + 8 <= n; i += 8) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    const __m256i x = _mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
    const __m256i small = _mm256_cmpeq_epi32(_mm256_and_si256(x, exponent), _mm256_setzero_si256());
    const __m256i y = _mm256_blendv_epi8(x, _mm256_and_si256(x, sign), small);
    _mm256_storeu_ps(out + i, _mm256_castsi256_ps(y));
  }
#endif
#pragma GCC ivdep
  for (int64_t k = i; k < n; ++k) out[k] = math::widen(in[k]);
}

HD void narrow_many(Bf16* out, const float* in, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) math::narrow(in[i], out[i]);
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

#endif

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
