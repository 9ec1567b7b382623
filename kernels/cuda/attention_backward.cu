// Attention backward, without atomics: dq in one pass over blocks of queries, dk and dv in another
// over blocks of keys. Each forms the probabilities again from lse. With P the probabilities, M the
// mask of dropout and delta = sum_j P dP of a row, which is dout . out (Dao et al. 2022):
//   dP = (dout v^T) M,  dS = scale P (dP - delta),  dq = dS k,  dk = dS^T q,  dv = (P M)^T dout
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/attention_tiles.h"

namespace shardrun::cuda {

namespace {

// Blocks that a multiprocessor must hold; 0: as many as the compiler likes. In fp32 it would spill to
// fit more.
template <typename T, int kSize>
inline constexpr int kBlocks = sizeof(T) == 4 && kSize <= 96 ? 2 : 0;

// One warp per row of a head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(float* delta, const T* dout, const T* out, int64_t rows, int time, int heads,
                 int size) {
  const int64_t item = global_thread() / kLanes;  // (b T + t) H + h
  if (item >= rows) return;                       // the whole warp leaves
  float sum = 0;
  for (int i = lane_of_warp(); i < size; i += kLanes) {
    sum += math::widen(dout[item * size + i]) * math::widen(out[item * size + i]);
  }
  sum = warp_sum(sum);
  const int64_t h = item % heads, t = item / heads % time, b = item / heads / time;
  if (lane_of_warp() == 0) delta[(b * heads + h) * time + t] = sum;
}

// Probabilities from scores and the gradients of scores from those of probabilities, in place;
// factor is the mask of dropout.
__device__ __forceinline__ void take_score(float& s, float& dp, bool seen, float factor, float lse,
                                           float delta, float scale) {
  const float p = math::exp(s * scale - lse);
  s = seen ? p * factor : 0.0f;
  dp = seen ? scale * (p * (dp * factor - delta)) : 0.0f;
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kAttentionThreads, (kBlocks<T, kSize>))
    dq_kernel(T* dqkv, const T* dout, const T* qkv, const float* lse, const float* delta,
              const __grid_constant__ AttentionArguments a) {
  using Matrix = SharedMatrix<T, kSize>;
  constexpr int kStep = Tiles<T, kSize>::kStep;
  const AttentionProblem& p = a.p;
  const Part part = part_of(a);
  const Matrix q{0}, dout_rows{Matrix::words(kRows)}, k{2 * Matrix::words(kRows)},
      v{k.first + Matrix::words(kStep)};
  const T* head = qkv + part.qkv;
  const int64_t stride = 3 * part.channels;
  const int row = part.first + part.warp_row;
  const int query = row + tile_row();
  const int keys = p.causal && part.first + kRows < p.time ? part.first + kRows : p.time;
  const int seen = row >= p.time ? 0 : p.causal && row + 16 < p.time ? row + 16 : p.time;

  float row_lse[2], row_delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = query + 8 * half;
    row_lse[half] = i < p.time ? lse[part.head * p.time + i] : 0.0f;
    row_delta[half] = i < p.time ? delta[part.head * p.time + i] : 0.0f;
  }
  TileC dq[kSize / 8]{};
  load_rows<kRows>(q, head, stride, part.first, a);
  load_rows<kRows>(dout_rows, dout + part.out, part.channels, part.first, a);
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
    TileC s[kStep / 8]{}, dp[kStep / 8]{};
#pragma unroll
    for (int d = 0; d < kSize; d += 16) {
      TileA<T> rows, gradients;
      load_a(rows, q, part.warp_row, d);
      load_a(gradients, dout_rows, part.warp_row, d);
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        if (n >= groups) continue;
        TileB<T> columns[2];
        load_b(columns, k, 16 * n, d);
        multiply(s[2 * n], rows, columns[0]);
        multiply(s[2 * n + 1], rows, columns[1]);
        load_b(columns, v, 16 * n, d);
        multiply(dp[2 * n], gradients, columns[0]);
        multiply(dp[2 * n + 1], gradients, columns[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < kStep / 2; ++e) {
      const int half = e % 4 / 2;
      take_score(s[e / 4].x[e % 4], dp[e / 4].x[e % 4],
                 visible(p, query + 8 * half, key0 + e / 4 * 8 + tile_column() + e % 2),
                 dropout_factor(p, kept, e), row_lse[half], row_delta[half], p.scale);
    }
#pragma unroll
    for (int n = 0; n < kStep / 16; ++n) {
      if (n >= groups) continue;
      const TileA<T> ds = as_a<T>(dp[2 * n], dp[2 * n + 1]);
#pragma unroll
      for (int d = 0; d < kSize / 16; ++d) {
        TileB<T> columns[2];
        load_b_down(columns, k, 16 * n, 16 * d);
        multiply(dq[2 * d], ds, columns[0]);
        multiply(dq[2 * d + 1], ds, columns[1]);
      }
    }
  }
  store_rows<T, kSize>(dqkv + part.qkv, stride, row, dq, {1, 1}, a);
}

// Rows of tiles are keys here, columns queries.
template <typename T, int kSize>
__global__ void __launch_bounds__(kAttentionThreads, (kBlocks<T, kSize>))
    dkv_kernel(T* dqkv, const T* dout, const T* qkv, const float* lse, const float* delta,
               const __grid_constant__ AttentionArguments a) {
  using Matrix = SharedMatrix<T, kSize>;
  constexpr int kStep = Tiles<T, kSize>::kStep;
  const AttentionProblem& p = a.p;
  const Part part = part_of(a);
  const Matrix k{0}, v{Matrix::words(kRows)}, q{2 * Matrix::words(kRows)},
      dout_rows{q.first + Matrix::words(kStep)};
  const T* head = qkv + part.qkv;
  const int64_t stride = 3 * part.channels;
  const int row = part.first + part.warp_row;
  const int key = row + tile_row();

  TileC dk[kSize / 8]{}, dv[kSize / 8]{};
  load_rows<kRows>(k, head + part.channels, stride, part.first, a);
  load_rows<kRows>(v, head + 2 * part.channels, stride, part.first, a);
  // Under a causal mask the first query that sees a key is the key's own.
  for (int query0 = p.causal ? part.first : 0; query0 < p.time; query0 += kStep) {
    __syncthreads();  // the queries before were read
    load_rows<kStep>(q, head, stride, query0, a);
    load_rows<kStep>(dout_rows, dout + part.out, part.channels, query0, a);
    __syncthreads();
    // Groups of 16 queries that see none of the warp's keys come first, those past the end last.
    const int groups = row < p.time ? groups_until<kStep>(query0, p.time) : 0;
    const int skipped = p.causal && row > query0 ? (row - query0) / 16 : 0;
    if (skipped >= groups) continue;

    const uint32_t kept = dropout_bits<kStep / 8>(p, [&](int n, int down, int right) {
      return dropout_element(p, part.head, query0 + 8 * n + tile_column() + right, key + down);
    });
    TileC s[kStep / 8]{}, dp[kStep / 8]{};
#pragma unroll
    for (int d = 0; d < kSize; d += 16) {
      TileA<T> keys, values;
      load_a(keys, k, part.warp_row, d);
      load_a(values, v, part.warp_row, d);
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        if (n < skipped || n >= groups) continue;
        TileB<T> columns[2];
        load_b(columns, q, 16 * n, d);
        multiply(s[2 * n], keys, columns[0]);
        multiply(s[2 * n + 1], keys, columns[1]);
        load_b(columns, dout_rows, 16 * n, d);
        multiply(dp[2 * n], values, columns[0]);
        multiply(dp[2 * n + 1], values, columns[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < kStep / 4; ++e) {
      const int i = query0 + e / 2 * 8 + e % 2 + tile_column();
      const bool there = i < p.time;
      const float i_lse = there ? lse[part.head * p.time + i] : 0.0f;
      const float i_delta = there ? delta[part.head * p.time + i] : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 2 * half + e % 2;
        take_score(s[e / 2].x[at], dp[e / 2].x[at], visible(p, i, key + 8 * half),
                   dropout_factor(p, kept, e / 2 * 4 + at), i_lse, i_delta, p.scale);
      }
    }
#pragma unroll
    for (int n = 0; n < kStep / 16; ++n) {
      if (n < skipped || n >= groups) continue;
      const TileA<T> probs = as_a<T>(s[2 * n], s[2 * n + 1]);
      const TileA<T> ds = as_a<T>(dp[2 * n], dp[2 * n + 1]);
#pragma unroll
      for (int d = 0; d < kSize / 16; ++d) {
        TileB<T> columns[2];
        load_b_down(columns, dout_rows, 16 * n, 16 * d);
        multiply(dv[2 * d], probs, columns[0]);
        multiply(dv[2 * d + 1], probs, columns[1]);
        load_b_down(columns, q, 16 * n, 16 * d);
        multiply(dk[2 * d], ds, columns[0]);
        multiply(dk[2 * d + 1], ds, columns[1]);
      }
    }
  }
  store_rows<T, kSize>(dqkv + part.qkv + part.channels, stride, row, dk, {1, 1}, a);
  store_rows<T, kSize>(dqkv + part.qkv + 2 * part.channels, stride, row, dv, {1, 1}, a);
}

}  // namespace

size_t flash_backward_workspace(const AttentionProblem& p) {
  return static_cast<size_t>(int64_t{p.batch} * p.heads * p.time) * sizeof(float);
}

void flash_backward(void* dqkv, const void* dout, const void* out, const void* qkv,
                    const float* lse, const AttentionProblem& p, void* workspace,
                    StreamHandle stream) {
  float* delta = static_cast<float*>(workspace);
  const int blocks = static_cast<int>(quotient_up(p.time, kRows));
  const AttentionArguments arguments{p, blocks, rows_are_aligned({dqkv, dout, qkv}, p)};
  const int64_t rows = int64_t{p.batch} * p.heads * p.time;
  const dim3 grid(static_cast<unsigned>(int64_t{p.batch} * p.heads * blocks));
  with_types(p, [&](auto element, auto size) {
    using T = decltype(element);
    const T *dout_t = static_cast<const T*>(dout), *qkv_t = static_cast<const T*>(qkv);
    launch(per_thread("attention_delta", rows * kLanes, stream), delta_kernel<T>, delta, dout_t,
           static_cast<const T*>(out), rows, p.time, p.heads, p.size);
    constexpr size_t kBytes = Tiles<T, size()>::bytes(2, 2);
    launch({"attention_dq", grid, dim3(kAttentionThreads), stream, kBytes}, dq_kernel<T, size()>,
           static_cast<T*>(dqkv), dout_t, qkv_t, lse, delta, arguments);
    launch({"attention_dkv", grid, dim3(kAttentionThreads), stream, kBytes}, dkv_kernel<T, size()>,
           static_cast<T*>(dqkv), dout_t, qkv_t, lse, delta, arguments);
  });
}

}  // namespace shardrun::cuda
