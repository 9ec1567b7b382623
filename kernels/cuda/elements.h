// Elements of floating tensors in device code: widened to fp32 on the way in, rounded on the way
// out. The dtype is looked at once per access, the same way by all threads, so there is one copy of
// each kernel for all dtypes.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/math/convert.h"

namespace shardrun::cuda {

inline constexpr int kVector =
    8;  // elements of a thread in one access: 16 bytes of a 16-bit format
inline constexpr int kThreads = 256;  // of a block

inline int64_t quotient_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// One thread per item; the grid's first dimension is the one without a small limit.
inline Launch per_thread(const char* kernel, int64_t items, StreamHandle stream) {
  return {kernel, dim3(static_cast<unsigned>(quotient_up(items, kThreads))), dim3(kThreads),
          stream};
}

__device__ __forceinline__ int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ float load(In in, int64_t i) {
  switch (in.dtype) {
    case Dtype::bf16:
      return math::widen(static_cast<const Bf16*>(in.data)[i]);
    case Dtype::fp16:
      return math::widen(static_cast<const Fp16*>(in.data)[i]);
    default:
      return static_cast<const float*>(in.data)[i];
  }
}

__device__ __forceinline__ void store(Out out, int64_t i, float x) {
  switch (out.dtype) {
    case Dtype::bf16:
      return math::narrow(x, static_cast<Bf16*>(out.data)[i]);
    case Dtype::fp16:
      return math::narrow(x, static_cast<Fp16*>(out.data)[i]);
    default:
      static_cast<float*>(out.data)[i] = x;
  }
}

struct Eight {
  float x[kVector];
};

__device__ __forceinline__ bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(uint4) == 0;
}
__device__ __forceinline__ uint4 load_vector(const void* p) {
  expect_aligned(p, sizeof(uint4));
  return *static_cast<const uint4*>(p);
}
__device__ __forceinline__ void store_vector(void* p, uint4 v) {
  expect_aligned(p, sizeof(uint4));
  *static_cast<uint4*>(p) = v;
}

template <typename T>
__device__ __forceinline__ void load_eight(Eight& v, const T* p) {
  const uint4 raw = load_vector(p);
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    v.x[2 * k] = math::widen(T{static_cast<uint16_t>(word[k])});
    v.x[2 * k + 1] = math::widen(T{static_cast<uint16_t>(word[k] >> 16)});
  }
}
__device__ __forceinline__ void load_eight(Eight& v, const float* p) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 raw = load_vector(p + 4 * half);
    v.x[4 * half] = math::float_of(raw.x);
    v.x[4 * half + 1] = math::float_of(raw.y);
    v.x[4 * half + 2] = math::float_of(raw.z);
    v.x[4 * half + 3] = math::float_of(raw.w);
  }
}

template <typename T>
__device__ __forceinline__ void store_eight(T* p, const Eight& v) {
  uint32_t word[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    T low, high;
    math::narrow(v.x[2 * k], low);
    math::narrow(v.x[2 * k + 1], high);
    word[k] = low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
  store_vector(p, uint4{word[0], word[1], word[2], word[3]});
}
__device__ __forceinline__ void store_eight(float* p, const Eight& v) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    store_vector(p + 4 * half,
                 uint4{math::bits_of(v.x[4 * half]), math::bits_of(v.x[4 * half + 1]),
                       math::bits_of(v.x[4 * half + 2]), math::bits_of(v.x[4 * half + 3])});
  }
}

template <typename T>
__device__ __forceinline__ void load_some(Eight& v, const T* p, int count) {
  if (count >= kVector && is_aligned(p)) return load_eight(v, p);
#pragma unroll
  for (int k = 0; k < kVector; ++k) v.x[k] = k < count ? math::widen(p[k]) : 0.0f;
}

template <typename T>
__device__ __forceinline__ void store_some(T* p, const Eight& v, int count) {
  if (count >= kVector && is_aligned(p)) return store_eight(p, v);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (k < count) math::narrow(v.x[k], p[k]);
  }
}

// Elements [begin, begin + count), at most eight; the others are zero.
__device__ __forceinline__ void load(Eight& v, In in, int64_t begin, int count) {
  switch (in.dtype) {
    case Dtype::bf16:
      return load_some(v, static_cast<const Bf16*>(in.data) + begin, count);
    case Dtype::fp16:
      return load_some(v, static_cast<const Fp16*>(in.data) + begin, count);
    default:
      return load_some(v, static_cast<const float*>(in.data) + begin, count);
  }
}

__device__ __forceinline__ void store(Out out, int64_t begin, const Eight& v, int count) {
  switch (out.dtype) {
    case Dtype::bf16:
      return store_some(static_cast<Bf16*>(out.data) + begin, v, count);
    case Dtype::fp16:
      return store_some(static_cast<Fp16*>(out.data) + begin, v, count);
    default:
      return store_some(static_cast<float*>(out.data) + begin, v, count);
  }
}

// How many of eight elements from `begin` on exist.
__device__ __forceinline__ int count_from(int64_t begin, int64_t n) {
  return static_cast<int>(n - begin < kVector ? n - begin : kVector);
}

}  // namespace shardrun::cuda
