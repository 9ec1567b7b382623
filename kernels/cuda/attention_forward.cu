// Attention forward: softmax over keys as they come (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018).
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/attention_tiles.h"

namespace shardrun::cuda {

namespace {

// Per lane: of rows g and g + 8 the largest score so far, and its share of the sum of exponentials.
struct Softmax {
  float top[2], sum[2];
};

// Scores become exponentials less the new maximum; factor is what earlier sums shrink by.
template <int kTiles>
__device__ __forceinline__ void take_scores(Softmax& softmax, float (&factor)[2],
                                            TileC (&s)[kTiles], const AttentionProblem& p,
                                            int query, int key) {
  const float infinity = math::float_of(0x7f800000u);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = softmax.top[half];
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) {
      float& x = s[e / 2].x[2 * half + e % 2];
      const bool seen = visible(p, query + 8 * half, key + e / 2 * 8 + e % 2);
      x = seen ? x * p.scale : -infinity;
      top = larger(top, x);
    }
    top = quad_max(top);
    // With nothing seen yet there is nothing to subtract.
    const float base = top == -infinity ? 0.0f : top;
    factor[half] = math::exp(softmax.top[half] - base);
    softmax.top[half] = top;
    float sum = softmax.sum[half] * factor[half];
#pragma unroll
    for (int e = 0; e < 2 * kTiles; ++e) {
      float& x = s[e / 2].x[2 * half + e % 2];
      x = math::exp(x - base);
      sum += x;
    }
    softmax.sum[half] = sum;
  }
}

// Two blocks of fp32 on a multiprocessor: the compiler alone would spill to fit more.
template <typename T, int kSize>
__global__ void __launch_bounds__(kAttentionThreads, sizeof(T) == 4 ? 2 : 0)
    forward_kernel(T* out, float* lse, const T* qkv, const __grid_constant__ AttentionArguments a) {
  using Matrix = SharedMatrix<T, kSize>;
  constexpr int kStep = Tiles<T, kSize>::kStep;
  const AttentionProblem& p = a.p;
  const Part part = part_of(a);
  const Matrix q{0}, k{Matrix::words(kRows)}, v{k.first + Matrix::words(kStep)};
  const T* head = qkv + part.qkv;
  const int64_t stride = 3 * part.channels;
  const int row = part.first + part.warp_row;  // of the warp
  const int query = row + tile_row();          // of the lane
  const int keys = p.causal && part.first + kRows < p.time ? part.first + kRows : p.time;
  const int seen = row >= p.time ? 0 : p.causal && row + 16 < p.time ? row + 16 : p.time;

  const float infinity = math::float_of(0x7f800000u);
  Softmax softmax{{-infinity, -infinity}, {0, 0}};
  TileC sum[kSize / 8]{};
  load_rows<kRows>(q, head, stride, part.first, a);
  for (int key0 = 0; key0 < keys; key0 += kStep) {
    __syncthreads();  // the keys before were read
    load_rows<kStep>(k, head + part.channels, stride, key0, a);
    load_rows<kStep>(v, head + 2 * part.channels, stride, key0, a);
    __syncthreads();
    const int groups = groups_until<kStep>(key0, seen);
    if (groups == 0) continue;

    const uint32_t kept = dropout_bits<kStep / 8>(p, [&](int n, int down, int right) {
      return dropout_element(p, part.head, query + down, key0 + 8 * n + tile_column() + right);
    });
    TileC s[kStep / 8]{};
#pragma unroll
    for (int d = 0; d < kSize; d += 16) {
      TileA<T> rows;
      load_a(rows, q, part.warp_row, d);
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        if (n >= groups) continue;
        TileB<T> columns[2];
        load_b(columns, k, 16 * n, d);
        multiply(s[2 * n], rows, columns[0]);
        multiply(s[2 * n + 1], rows, columns[1]);
      }
    }
    float factor[2];
    take_scores(softmax, factor, s, p, query, key0 + tile_column());
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) s[i / 4].x[i % 4] *= dropout_factor(p, kept, i);
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) sum[i / 4].x[i % 4] *= factor[i % 4 / 2];
#pragma unroll
    for (int n = 0; n < kStep / 16; ++n) {
      if (n >= groups) continue;
      const TileA<T> probs = as_a<T>(s[2 * n], s[2 * n + 1]);
#pragma unroll
      for (int d = 0; d < kSize / 16; ++d) {
        TileB<T> values[2];
        load_b_down(values, v, 16 * n, 16 * d);
        multiply(sum[2 * d], probs, values[0]);
        multiply(sum[2 * d + 1], probs, values[1]);
      }
    }
  }

  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(softmax.sum[half]);
    inverse[half] = 1.0f / total;
    const int i = query + 8 * half;
    if (i < p.time && tile_column() == 0) {
      lse[part.head * p.time + i] = softmax.top[half] + math::log(total);
    }
  }
  store_rows<T, kSize>(out + part.out, part.channels, row, sum, inverse, a);
}

}  // namespace

void flash_forward(void* out, float* lse, const void* qkv, const AttentionProblem& p,
                   StreamHandle stream) {
  const int blocks = static_cast<int>(quotient_up(p.time, kRows));
  const AttentionArguments arguments{p, blocks, rows_are_aligned({out, qkv}, p)};
  const int64_t grid = int64_t{p.batch} * p.heads * blocks;
  with_types(p, [&](auto element, auto size) {
    using T = decltype(element);
    launch({"attention_forward", dim3(static_cast<unsigned>(grid)), dim3(kAttentionThreads), stream,
            Tiles<T, size()>::bytes(1, 2)},
           forward_kernel<T, size()>, static_cast<T*>(out), lse, static_cast<const T*>(qkv),
           arguments);
  });
}

}  // namespace shardrun::cuda
