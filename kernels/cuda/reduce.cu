// Folding leaves, and squares for the norm of the gradient.
#include "kernels/cuda/rows.h"

namespace shardrun::cuda {

namespace {

constexpr int kSquareBlock = 256;

__device__ __forceinline__ bool not_finite(float x) {
  return (math::bits_of(x) & 0x7f800000u) == 0x7f800000u;
}

// The kind of a place is the leaf's where the leaf is to blame, else the sum's. The smallest place
// is found by an integer atomic, which no order changes.
template <bool kAdd>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(float* accumulator, In leaf, int64_t n, int64_t* found, int64_t tag) {
  const int64_t begin = kVector * global_thread();
  if (begin >= n) return;
  const int count = count_from(begin, n);
  Eight x, sum{};
  load(x, leaf, begin, count);
  if constexpr (kAdd) load(sum, {accumulator, Dtype::fp32}, begin, count);
  int64_t first = INT64_MAX;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    sum.x[k] = kAdd ? sum.x[k] + x.x[k] : math::flush(x.x[k]);
    if (k < count && first == INT64_MAX && not_finite(sum.x[k])) {
      const float culprit = not_finite(x.x[k]) ? x.x[k] : sum.x[k];
      first = 2 * (begin + k) + (culprit != culprit ? 1 : 0);
    }
  }
  store({accumulator, Dtype::fp32}, begin, sum, count);
  if (first != INT64_MAX) {
    atomicMin(reinterpret_cast<long long*>(found), static_cast<long long>(tag + first));
  }
}

__global__ void __launch_bounds__(kThreads)
    block_squares_kernel(double* squares, const float* gradient, int64_t blocks) {
  const int64_t block = global_thread() / kLanes;
  if (block >= blocks) return;  // the whole warp leaves
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const float* x = gradient + block * kSquareBlock;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kSquareBlock; i += kLanes) {
    const double g = static_cast<double>(x[i + lane]);
    sum += g * g;
  }
  sum = warp_sum(sum);
  if (lane == 0) squares[block] = sum;
}

}  // namespace

void fold(float* accumulator, In leaf, bool add, int64_t n, int64_t* found, int64_t tag,
          StreamHandle stream) {
  if (n == 0) return;
  launch(per_thread("fold", quotient_up(n, kVector), stream),
         add ? fold_kernel<true> : fold_kernel<false>, accumulator, leaf, n, found, tag);
}

void block_squares(double* squares, const float* gradient, int64_t blocks, StreamHandle stream) {
  if (blocks == 0) return;
  launch(per_thread("block_squares", blocks * kLanes, stream), block_squares_kernel, squares,
         gradient, blocks);
}

}  // namespace shardrun::cuda
