// AdamW in one pass: each thread reads and writes eight elements of the slice once.
#include "kernels/cuda/elements.h"
#include "kernels/math/adamw.h"
#include "kernels/math/philox.h"

namespace shardrun::cuda {

namespace {

// Ranges travel as a kernel's parameter, which may be 4 KiB on every toolkit.
constexpr int kRanges = 64;

struct Range {
  int64_t begin, end;
  int64_t model_shift;  // index in the parameter minus index in the slice
  RandomKey key;
  float lr, decay;
};

struct Update {
  float* master;
  Out compute;
  float* moment1;
  float* moment2;
  const float* gradient;
  int64_t begin, end;  // of all ranges together
  math::AdamwStep step;
  int count;
  Range ranges[kRanges];
};
static_assert(sizeof(Update) <= 4096);

// The first range that ends past element i.
__device__ __forceinline__ int find_range(const Update& u, int64_t i) {
  int low = 0, high = u.count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (u.ranges[middle].end > i) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

__device__ __forceinline__ void write_moments_and_master(const Update& u, int64_t begin,
                                                         const Eight& p, const Eight& m,
                                                         const Eight& v, int count) {
  store({u.moment1, Dtype::fp32}, begin, m, count);
  store({u.moment2, Dtype::fp32}, begin, v, count);
  if (u.master) {
    store({u.master, Dtype::fp32}, begin, p, count);
    if (u.compute.data) store(u.compute, begin, p, count);
  }
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Update u) {
  const int64_t begin = u.begin + kVector * global_thread();
  if (begin >= u.end) return;
  const int count = count_from(begin, u.end);
  Eight p, m, v, g;
  load(p, u.master ? In{u.master, Dtype::fp32} : In{u.compute.data, u.compute.dtype}, begin, count);
  load(m, {u.moment1, Dtype::fp32}, begin, count);
  load(v, {u.moment2, Dtype::fp32}, begin, count);
  load(g, {u.gradient, Dtype::fp32}, begin, count);

  int r = find_range(u, begin);
  const bool whole = r < u.count && u.ranges[r].begin <= begin && begin + count <= u.ranges[r].end;
  math::AdamwStep step = u.step;
  math::Words4 draw{};
  int64_t group = -1;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const int64_t i = begin + k;
    while (!whole && r < u.count && u.ranges[r].end <= i) ++r;
    if (k >= count || r >= u.count || i < u.ranges[r].begin) continue;
    const Range& range = u.ranges[r];
    step.lr = range.lr;
    step.decay = range.decay;
    step(p.x[k], m.x[k], v.x[k], g.x[k]);
    if (!u.master) {
      const int64_t element = i + range.model_shift;
      // A range's draws are not aligned with the thread's elements, and another range has another
      // key.
      if (group != element / 4 || i == range.begin) {
        group = element / 4;
        draw = math::draw_group(range.key, static_cast<uint64_t>(group));
      }
      static_cast<Bf16*>(u.compute.data)[i] =
          math::narrow_stochastic(p.x[k], math::word_of(draw, static_cast<int>(element % 4)));
    }
    if (whole) continue;
    u.moment1[i] = m.x[k];
    u.moment2[i] = v.x[k];
    if (u.master) {
      u.master[i] = p.x[k];
      if (u.compute.data) store(u.compute, i, p.x[k]);
    }
  }
  if (whole) write_moments_and_master(u, begin, p, m, v, count);
}

}  // namespace

void adamw(const AdamwArguments& a, StreamHandle stream) {
  for (int64_t first = 0; first < a.range_count; first += kRanges) {
    Update u{};
    u.master = a.master;
    u.compute = a.compute;
    u.moment1 = a.moment1;
    u.moment2 = a.moment2;
    u.gradient = a.gradient;
    for (int64_t r = first; r < a.range_count && u.count < kRanges; ++r) {
      const kernels::AdamwRange& range = a.ranges[r];
      u.step = math::adamw_step(*a.scalars, range);
      u.ranges[u.count++] = {range.begin, range.end, range.model_begin - range.begin,
                             range.key,   u.step.lr, u.step.decay};
    }
    // From a multiple of eight on, so that the accesses are aligned where the slice is.
    u.begin = u.ranges[0].begin / kVector * kVector;
    u.end = u.ranges[u.count - 1].end;
    if (u.begin == u.end) continue;
    launch(per_thread("adamw", quotient_up(u.end - u.begin, kVector), stream), adamw_kernel, u);
  }
}

}  // namespace shardrun::cuda
