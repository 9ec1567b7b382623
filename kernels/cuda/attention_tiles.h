// What attention's kernels share: which rows a block has, loading them, masks. A block of four warps
// holds kRows rows of queries (forward, dq) or keys (dk and dv), 16 for each warp, and walks over the
// other side kStep rows at a time.
#pragma once

#include "kernels/cuda/attention.h"
#include "kernels/cuda/tile.h"
#include "kernels/math/functions.h"
#include "kernels/math/philox.h"

namespace shardrun::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kRows = 64;

struct AttentionArguments {
  AttentionProblem p;
  int blocks;    // of kRows rows in a sequence
  bool vectors;  // every row of every head begins at a multiple of 16 bytes
};

// A head size is padded with zeros to kSize.
template <typename T, int kSize>
struct Tiles {
  // What the registers of a thread hold beside the sums, without spilling.
  static constexpr int kStep = sizeof(T) == 4 ? (kSize <= 96 ? 32 : 16) : kSize <= 64 ? 64 : 32;
  using Matrix = SharedMatrix<T, kSize>;
  // Bytes of shared memory for `held` matrices of kRows and `stepped` of kStep rows.
  static constexpr size_t bytes(int held, int stepped) {
    return sizeof(uint32_t) *
           static_cast<size_t>(held * Matrix::words(kRows) + stepped * Matrix::words(kStep));
  }
};

// The part of a thread's block.
struct Part {
  int64_t head;  // b H + h
  int first;     // row of the block
  int warp_row;  // of the warp, in the block
  int64_t qkv;   // index of q of the head's row 0 in [B, T, 3C]
  int64_t out;   // the same in [B, T, C]
  int64_t channels;
};

// Blocks come from the end of a sequence on: under a causal mask its queries have the most work.
__device__ __forceinline__ Part part_of(const AttentionArguments& a) {
  Part part;
  part.head = blockIdx.x / static_cast<unsigned>(a.blocks);
  const int block = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.blocks));
  part.first = (a.blocks - 1 - block) * kRows;
  part.warp_row = static_cast<int>(threadIdx.x) / kLanes * 16;
  part.channels = int64_t{a.p.heads} * a.p.size;
  const int64_t b = part.head / a.p.heads, h = part.head % a.p.heads;
  part.qkv = b * a.p.time * 3 * part.channels + h * a.p.size;
  part.out = b * a.p.time * part.channels + h * a.p.size;
  return part;
}

// ---- Global memory.

template <typename T>
__device__ __forceinline__ uint32_t raw(T x) {
  if constexpr (sizeof(T) == 4) {
    return math::bits_of(x);
  } else {
    return x.bits;
  }
}

// 16 bytes of a row from element c on; zero past its `size` elements.
template <typename T>
__device__ __forceinline__ uint4 load_chunk(const T* row, int c, int size, bool vectors) {
  if (vectors) return c < size ? load_vector(row + c) : uint4{};
  constexpr int kInWord = 4 / sizeof(T);
  uint32_t word[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    word[w] = 0;
#pragma unroll
    for (int e = 0; e < kInWord; ++e) {
      const int i = c + w * kInWord + e;
      if (i < size) word[w] |= raw(row[i]) << (16 * e);
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

// Rows first .. first + kCount - 1 of a head, which begins at `head`, into the matrix; zero past the
// sequence. By the whole block, a barrier has to follow.
template <int kCount, typename T, int kSize>
__device__ __forceinline__ void load_rows(SharedMatrix<T, kSize> m, const T* head, int64_t stride,
                                          int first, const AttentionArguments& a) {
  constexpr int kInChunk = 16 / sizeof(T), kChunks = kSize / kInChunk;
  static_assert(kCount * kChunks % kAttentionThreads == 0);
#pragma unroll
  for (int i = 0; i < kCount * kChunks / kAttentionThreads; ++i) {
    const int item = i * kAttentionThreads + static_cast<int>(threadIdx.x);
    const int row = item / kChunks, c = item % kChunks * kInChunk;
    uint4 chunk{};
    if (first + row < a.p.time) {
      chunk = load_chunk(head + (first + row) * stride, c, a.p.size, a.vectors);
    }
    store_words(m.word(row, c), chunk);
  }
}

// The warp's 16 rows of fp32 sums, rounded into a head; `factor` for rows g and g + 8.
template <typename T, int kSize>
__device__ __forceinline__ void store_rows(T* head, int64_t stride, int row,
                                           const TileC (&x)[kSize / 8], const float (&factor)[2],
                                           const AttentionArguments& a) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + tile_row() + 8 * half;
    if (i >= a.p.time) continue;
#pragma unroll
    for (int n = 0; n < kSize / 8; ++n) {
      const int c = 8 * n + tile_column();
      T* to = head + i * stride + c;
      const float left = x[n].x[2 * half] * factor[half];
      const float right = x[n].x[2 * half + 1] * factor[half];
      if (sizeof(T) == 2 && a.vectors) {
        if (c < a.p.size) store_pair(to, make_pair<T>(left, right));
      } else {
        if (c < a.p.size) math::narrow(left, to[0]);
        if (c + 1 < a.p.size) math::narrow(right, to[1]);
      }
    }
  }
}

// ---- Masks.

// How many groups of 16 columns, of those from `begin` on, have a column below `end`.
template <int kStep>
__device__ __forceinline__ int groups_until(int begin, int end) {
  const int groups = (end - begin + 15) / 16;
  return groups < 0 ? 0 : groups > kStep / 16 ? kStep / 16 : groups;
}

__device__ __forceinline__ bool visible(const AttentionProblem& p, int query, int key) {
  return query < p.time && key < p.time && (!p.causal || key <= query);
}

__device__ __forceinline__ uint64_t dropout_element(const AttentionProblem& p, int64_t head,
                                                    int query, int key) {
  return static_cast<uint64_t>((head * p.time + query) * p.time + key);
}

// Which of the lane's probabilities in kTiles tiles are kept: bit 4 n + e for x[e] of tile n, whose
// draw is element(n, row 0 or 8, column 0 or 1). One loop of draws for all, before the scores take
// their registers.
template <int kTiles, typename Element>
__device__ __forceinline__ uint32_t dropout_bits(const AttentionProblem& p, Element element) {
  static_assert(kTiles <= 8);
  if (p.threshold == 0) return ~0u;
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < 2 * kTiles; ++i) {
    const uint64_t first = element(i / 2, i % 2 * 8, 0), second = element(i / 2, i % 2 * 8, 1);
    math::Words4 words = math::draw_group(p.key, first / 4);
    const uint32_t draw = math::word_of(words, static_cast<int>(first % 4));
    // Along a row the next is mostly of the same four.
    if (second / 4 != first / 4) words = math::draw_group(p.key, second / 4);
    const uint32_t next = math::word_of(words, static_cast<int>(second % 4));
    bits |= (draw >= p.threshold ? 1u : 0u) << (2 * i);
    bits |= (next >= p.threshold ? 2u : 0u) << (2 * i);
  }
  return bits;
}
__device__ __forceinline__ float dropout_factor(const AttentionProblem& p, uint32_t bits, int i) {
  return (bits >> i & 1u) != 0 ? p.keep_scale : 0.0f;
}

// Of the four lanes that share a row of c.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
__device__ __forceinline__ float larger(float a, float b) {
  return b > a ? b : a;
}
__device__ __forceinline__ float quad_max(float x) {
  x = larger(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return larger(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

// ---- Launching.

inline bool rows_are_aligned(std::initializer_list<const void*> tensors,
                             const AttentionProblem& p) {
  const size_t bytes = p.dtype == Dtype::fp32 ? 4 : 2;
  // A head's rows are a multiple of its size apart.
  bool aligned = static_cast<size_t>(p.size) * bytes % sizeof(uint4) == 0;
  for (const void* tensor : tensors) {
    aligned = aligned && reinterpret_cast<uintptr_t>(tensor) % sizeof(uint4) == 0;
  }
  return aligned;
}

// call(T{}, integral_constant of the padded head size)
template <typename Call>
void with_types(const AttentionProblem& p, Call call) {
  const auto with_size = [&](auto element) {
    if (p.size <= 32) return call(element, std::integral_constant<int, 32>());
    if (p.size <= 64) return call(element, std::integral_constant<int, 64>());
    if (p.size <= 96) return call(element, std::integral_constant<int, 96>());
    call(element, std::integral_constant<int, 128>());
  };
  if (p.dtype == Dtype::bf16) return with_size(Bf16{});
  if (p.dtype == Dtype::fp16) return with_size(Fp16{});
  with_size(float{});
}

}  // namespace shardrun::cuda
