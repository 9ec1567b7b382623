// A matrix product of small tiles by one warp, c[16, 8] += a[16, 16] b[16, 8] in fp32, and the ways
// from shared memory into it. All 32 lanes call each function together. Used by attention.
//
// [Note: lanes and elements] A tile lies spread over the warp as the tensor cores' m16n8k16 wants
// it (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). With g = lane / 4
// and t = lane % 4 a lane holds pairs of neighbours, the first of them at
//
//   a   x[0] row g, k 2t      x[1] row g + 8, k 2t      x[2] row g, k 2t + 8   x[3] g + 8, 2t + 8
//   b   x[0] k 2t, column g   x[1] k 2t + 8, column g   (neighbours along k)
//   c   x[0], x[1] row g, columns 2t, 2t + 1            x[2], x[3] row g + 8
//
// so two c's side by side are the a of a following product. 16-bit tiles are multiplied by tensor
// cores where the architecture has the instruction; fp32, and what has none, by fused multiply-adds
// over shuffles, from the same layout. tests/virtual_cuda/tensor_core.h stands in for the instructions.
#pragma once

#include "kernels/cuda/rows.h"

namespace shardrun::cuda {

// ---- Tiles.

template <typename T>
struct Pair {
  uint32_t bits;  // the first element in the low half
};
template <>
struct Pair<float> {
  float x[2];
};

template <typename T>
struct TileA {
  Pair<T> x[4];
};
template <typename T>
struct TileB {
  Pair<T> x[2];
};
struct TileC {
  float x[4];
};

__device__ __forceinline__ int lane_of_warp() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
// Where c's x[0] is.
__device__ __forceinline__ int tile_row() {
  return lane_of_warp() / 4;
}
__device__ __forceinline__ int tile_column() {
  return 2 * (lane_of_warp() % 4);
}

template <typename T>
__device__ __forceinline__ Pair<T> make_pair(float first, float second) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return {{first, second}};
  } else {
    T low, high;
    math::narrow(first, low);
    math::narrow(second, high);
    return {low.bits | static_cast<uint32_t>(high.bits) << 16};
  }
}

template <typename T>
__device__ __forceinline__ float element_of(const Pair<T>& pair, int i) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return pair.x[i];
  } else {
    return math::widen(T{static_cast<uint16_t>(i == 0 ? pair.bits : pair.bits >> 16)});
  }
}

// Two c's, columns 0..7 and 8..15, rounded into an a.
template <typename T>
__device__ __forceinline__ TileA<T> as_a(const TileC& left, const TileC& right) {
  return {{make_pair<T>(left.x[0], left.x[1]), make_pair<T>(left.x[2], left.x[3]),
           make_pair<T>(right.x[0], right.x[1]), make_pair<T>(right.x[2], right.x[3])}};
}

// ---- The product.

// Element k of a's rows, and of b's columns, comes from the lane that has it.
template <typename T>
__device__ __forceinline__ void multiply_by_shuffles(TileC& c, const TileA<T>& a,
                                                     const TileB<T>& b) {
  const int own_row = 4 * tile_row(), own_columns = 4 * tile_column();
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int source = k % 8 / 2, half = k / 8, i = k % 2;
    const float upper = __shfl_sync(kWholeWarp, element_of(a.x[2 * half], i), own_row + source);
    const float lower = __shfl_sync(kWholeWarp, element_of(a.x[2 * half + 1], i), own_row + source);
    const float mine = element_of(b.x[half], i);
    const float left = __shfl_sync(kWholeWarp, mine, own_columns + source);
    const float right = __shfl_sync(kWholeWarp, mine, own_columns + 4 + source);
    c.x[0] = fmaf(upper, left, c.x[0]);
    c.x[1] = fmaf(upper, right, c.x[1]);
    c.x[2] = fmaf(lower, left, c.x[2]);
    c.x[3] = fmaf(lower, right, c.x[3]);
  }
}

#ifdef SHARDRUN_VIRTUAL_CUDA
// fp32, too: shuffles take long there. The test of tiles runs those.
template <typename T>
inline constexpr bool kTensorCores = true;
inline constexpr bool kMatrixLoads = true;
using virtual_cuda::ldmatrix_x4;
using virtual_cuda::ldmatrix_x4_trans;
using virtual_cuda::mma_m16n8k16;
#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <typename T>
inline constexpr bool kTensorCores = sizeof(T) == 2;
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const Pair<Bf16> (&a)[4],
                                             const Pair<Bf16> (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0].bits), "r"(a[1].bits), "r"(a[2].bits), "r"(a[3].bits), "r"(b[0].bits),
        "r"(b[1].bits));
}
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const Pair<Fp16> (&a)[4],
                                             const Pair<Fp16> (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0].bits), "r"(a[1].bits), "r"(a[2].bits), "r"(a[3].bits), "r"(b[0].bits),
        "r"(b[1].bits));
}
#else
template <typename T>
inline constexpr bool kTensorCores = false;
template <typename T>
__device__ void mma_m16n8k16(float (&)[4], const Pair<T> (&)[4], const Pair<T> (&)[2]);  // none
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
inline constexpr bool kMatrixLoads = true;
#else
inline constexpr bool kMatrixLoads = false;
#endif

// Four 8 x 8 matrices of 16-bit elements; lane l names the word where row l % 8 of matrix l / 8
// begins.
template <typename T>
__device__ __forceinline__ void ldmatrix_x4(Pair<T> (&x)[4], DynamicShared<uint32_t> words,
                                            int row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&words[row]));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0].bits), "=r"(x[1].bits), "=r"(x[2].bits), "=r"(x[3].bits)
               : "r"(at)
               : "memory");
}
template <typename T>
__device__ __forceinline__ void ldmatrix_x4_trans(Pair<T> (&x)[4], DynamicShared<uint32_t> words,
                                                  int row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&words[row]));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0].bits), "=r"(x[1].bits), "=r"(x[2].bits), "=r"(x[3].bits)
               : "r"(at)
               : "memory");
}
#endif

template <typename T>
__device__ __forceinline__ void multiply(TileC& c, const TileA<T>& a, const TileB<T>& b) {
  if constexpr (kTensorCores<T>) {
    mma_m16n8k16(c.x, a.x, b.x);
  } else {
    multiply_by_shuffles(c, a, b);
  }
}

// ---- Memory.

// Four words of dynamic shared memory at once, from a multiple of four on.
__device__ __forceinline__ void store_words(int word, uint4 v) {
  DynamicShared<uint32_t> memory;
#ifdef SHARDRUN_VIRTUAL_CUDA
  memory.store_vector(word, v);
#else
  *reinterpret_cast<uint4*>(&memory[word]) = v;
#endif
}

// Two neighbours in global memory at once.
template <typename T>
__device__ __forceinline__ void store_pair(T* to, const Pair<T>& pair) {
  if constexpr (sizeof(T) == 2) {
    expect_aligned(to, sizeof pair.bits);
    *reinterpret_cast<uint32_t*>(to) = pair.bits;
  } else {
    to[0] = pair.x[0];
    to[1] = pair.x[1];
  }
}

// A row-major matrix of T in the block's dynamic shared memory, whose rows are kColumns long, a
// multiple of 16. Between rows lie 16 bytes, so that eight rows' chunks are in different banks.
template <typename T, int kColumns>
struct SharedMatrix {
  static constexpr int kInWord = 4 / sizeof(T);
  static constexpr int kStride = kColumns / kInWord + 4;  // words
  __host__ __device__ static constexpr int words(int rows) { return rows * kStride; }
  static_assert(kColumns % 16 == 0);

  int first;  // word

  __device__ __forceinline__ int word(int row, int column) const {
    return first + row * kStride + column / kInWord;
  }
  // The pair at (row, column) and (row, column + 1); column is even.
  __device__ __forceinline__ Pair<T> pair(int row, int column) const {
    DynamicShared<uint32_t> memory;
    const int at = word(row, column);
    if constexpr (sizeof(T) == 4) {
      return {{math::float_of(memory[at]), math::float_of(memory[at + 1])}};
    } else {
      return {memory[at]};
    }
  }
  // The pair at (row, column) and (row + 1, column).
  __device__ __forceinline__ Pair<T> pair_down(int row, int column) const {
    DynamicShared<uint32_t> memory;
    const uint32_t upper = memory[word(row, column)], lower = memory[word(row + 1, column)];
    if constexpr (sizeof(T) == 4) {
      return {{math::float_of(upper), math::float_of(lower)}};
    } else if (column % 2 == 0) {
      return {(upper & 0xffffu) | lower << 16};
    } else {
      return {upper >> 16 | (lower & 0xffff0000u)};
    }
  }
};

// a[i, k] = m[row + i, k0 + k]
template <typename T, int kColumns>
__device__ __forceinline__ void load_a_plainly(TileA<T>& a, SharedMatrix<T, kColumns> m, int row,
                                               int k0) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.x[i] = m.pair(row + tile_row() + i % 2 * 8, k0 + tile_column() + i / 2 * 8);
  }
}
template <typename T, int kColumns>
__device__ __forceinline__ void load_a(TileA<T>& a, SharedMatrix<T, kColumns> m, int row, int k0) {
  if constexpr (kMatrixLoads && sizeof(T) == 2) {
    const int lane = lane_of_warp();
    ldmatrix_x4(a.x, DynamicShared<uint32_t>(), m.word(row + lane % 16, k0 + lane / 16 * 8));
  } else {
    load_a_plainly(a, m, row, k0);
  }
}

// Two b's side by side, 16 columns: b[k, j] = m[row + j, k0 + k].
template <typename T, int kColumns>
__device__ __forceinline__ void load_b_plainly(TileB<T> (&b)[2], SharedMatrix<T, kColumns> m,
                                               int row, int k0) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i / 2].x[i % 2] = m.pair(row + i / 2 * 8 + tile_row(), k0 + tile_column() + i % 2 * 8);
  }
}
template <typename T, int kColumns>
__device__ __forceinline__ void load_b(TileB<T> (&b)[2], SharedMatrix<T, kColumns> m, int row,
                                       int k0) {
  if constexpr (kMatrixLoads && sizeof(T) == 2) {
    const int lane = lane_of_warp();
    Pair<T> x[4];
    ldmatrix_x4(x, DynamicShared<uint32_t>(),
                m.word(row + lane / 16 * 8 + lane % 8, k0 + lane / 8 % 2 * 8));
    b[0] = {{x[0], x[1]}};
    b[1] = {{x[2], x[3]}};
  } else {
    load_b_plainly(b, m, row, k0);
  }
}

// Two b's side by side from a matrix that has b's rows as rows: b[k, j] = m[k0 + k, column + j].
template <typename T, int kColumns>
__device__ __forceinline__ void load_b_down_plainly(TileB<T> (&b)[2], SharedMatrix<T, kColumns> m,
                                                    int k0, int column) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i / 2].x[i % 2] =
        m.pair_down(k0 + tile_column() + i % 2 * 8, column + i / 2 * 8 + tile_row());
  }
}
template <typename T, int kColumns>
__device__ __forceinline__ void load_b_down(TileB<T> (&b)[2], SharedMatrix<T, kColumns> m, int k0,
                                            int column) {
  if constexpr (kMatrixLoads && sizeof(T) == 2) {
    const int lane = lane_of_warp();
    Pair<T> x[4];
    ldmatrix_x4_trans(x, DynamicShared<uint32_t>(), m.word(k0 + lane % 16, column + lane / 16 * 8));
    b[0] = {{x[0], x[1]}};
    b[1] = {{x[2], x[3]}};
  } else {
    load_b_down_plainly(b, m, k0, column);
  }
}

}  // namespace shardrun::cuda
