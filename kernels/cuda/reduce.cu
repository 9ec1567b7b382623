// Folding leaves, and squares for the norm of the gradient.
#include "kernels/cuda/rows.h"
#include "kernels/math/exact.h"

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

__device__ __forceinline__ void add_limb(int64_t* limb, int64_t part) {
  if (part == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(limb), static_cast<unsigned long long>(part));
}

// Values of one tensor lie close together: each thread adds up a window of limbs around its first
// value in registers, each warp the windows of its threads where they are the same, and what falls
// outside goes straight to memory. Integers: no order changes the sum.
constexpr int kValuesPerThread = 32;
constexpr int kWindow = 5;

__global__ void __launch_bounds__(kThreads)
    add_exact_kernel(int64_t* limbs, const double* values, int64_t n) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t sum[kWindow] = {};
  int64_t not_finite_count = 0;
  int base = -1;
  for (int64_t i = global_thread(); i < n; i += stride) {
    const math::ExactParts parts = math::exact_parts(values[i]);
    not_finite_count += !parts.finite;
    if ((parts.part[0] | parts.part[1] | parts.part[2]) == 0) continue;
    if (base < 0) base = parts.first > 0 ? parts.first - 1 : 0;
    const int offset = parts.first - base;
    if (offset < 0 || offset > kWindow - 3) {
      for (int k = 0; k < 3; ++k) add_limb(limbs + parts.first + k, parts.part[k]);
      continue;
    }
#pragma unroll
    for (int at = 0; at <= kWindow - 3; ++at) {
      if (offset != at) continue;
#pragma unroll
      for (int k = 0; k < 3; ++k) sum[at + k] += parts.part[k];
    }
  }
  not_finite_count = warp_sum(not_finite_count);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (lane == 0) add_limb(limbs + math::kExactLimbs, not_finite_count);
  const int first = __shfl_sync(kWholeWarp, base, 0);
  if (__all_sync(kWholeWarp, base == first)) {
    if (first < 0) return;  // the whole warp
#pragma unroll
    for (int k = 0; k < kWindow; ++k) {
      const int64_t whole = warp_sum(sum[k]);
      if (lane == 0) add_limb(limbs + first + k, whole);
    }
  } else if (base >= 0) {
#pragma unroll
    for (int k = 0; k < kWindow; ++k) add_limb(limbs + base + k, sum[k]);
  }
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

void add_exact(int64_t* limbs, const double* values, int64_t n, StreamHandle stream) {
  if (n == 0) return;
  launch(per_thread("add_exact", quotient_up(n, kValuesPerThread), stream), add_exact_kernel, limbs,
         values, n);
}

}  // namespace shardrun::cuda
