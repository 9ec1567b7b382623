// Layer norm and sums over columns. Sums over many rows: blocks of 64 rows, added top to bottom,
// then the blocks' sums pairwise, neighbours first.
#include "kernels/cuda/rows.h"
#include "kernels/math/functions.h"

namespace shardrun::cuda {

namespace {

constexpr int64_t kRowBlock = 64;
constexpr int kPartThreads = 128;  // columns of a block that sums 64 rows
constexpr int kFinishColumns = 32;
constexpr int kFinishRows = 8;

__global__ void __launch_bounds__(kThreads)
    layer_norm_forward_kernel(Out y, float* mean, float* rstd, In x, In weight, In bias, float eps,
                              int64_t rows, int64_t columns, int size) {
  __shared__ WarpNumbers numbers;
  const RowTeam team = row_team(size, rows);
  const int64_t at = team.row * columns;
  const float inverse = 1.0f / static_cast<float>(columns);
  const float m =
      row_sum(numbers, team, columns, [&](int64_t i) { return load(x, at + i); }) * inverse;
  const float variance = row_sum(numbers, team, columns,
                                 [&](int64_t i) {
                                   const float v = load(x, at + i);
                                   return (v - m) * (v - m);
                                 }) *
                         inverse;
  const float r = 1.0f / math::sqrt(variance + eps);
  if (team.has_row && team.member == 0 && team.lane == 0) {
    mean[team.row] = m;
    rstd[team.row] = r;
  }
  for_own(team, columns, [&](int64_t i) {
    const float normal = (load(x, at + i) - m) * r * load(weight, i);
    store(y, at + i, bias.data ? normal + load(bias, i) : normal);
  });
}

__global__ void __launch_bounds__(kThreads)
    layer_norm_backward_kernel(Out dx, In dy, In x, In weight, const float* mean, const float* rstd,
                               int64_t rows, int64_t columns, int size) {
  __shared__ WarpNumbers numbers;
  const RowTeam team = row_team(size, rows);
  const int64_t at = team.row * columns;
  const float m = team.has_row ? mean[team.row] : 0.0f;
  const float r = team.has_row ? rstd[team.row] : 0.0f;
  const float inverse = 1.0f / static_cast<float>(columns);
  const auto weighted = [&](int64_t i) { return load(dy, at + i) * load(weight, i); };
  const auto normal = [&](int64_t i) { return (load(x, at + i) - m) * r; };
  const float a = row_sum(numbers, team, columns, weighted) * inverse;
  const float b =
      row_sum(numbers, team, columns, [&](int64_t i) { return weighted(i) * normal(i); }) * inverse;
  for_own(team, columns, [&](int64_t i) {
    const float n = normal(i);
    store(dx, at + i, r * ((weighted(i) - a) - n * b));
  });
}

// Sums of one block of rows and 128 columns: of dy and dy x normal, or of dy alone.
template <bool kNorm>
__global__ void __launch_bounds__(kPartThreads)
    column_parts_kernel(float* parts, In dy, In x, const float* mean, const float* rstd,
                        int64_t rows, int64_t columns, int64_t tiles) {
  const int64_t block = blockIdx.x / tiles;
  const int64_t c = blockIdx.x % tiles * kPartThreads + threadIdx.x;
  if (c >= columns) return;
  const int64_t last = (block + 1) * kRowBlock < rows ? (block + 1) * kRowBlock : rows;
  float sum = 0, weighted = 0;
  for (int64_t row = block * kRowBlock; row < last; ++row) {
    const float g = load(dy, row * columns + c);
    sum += g;
    if constexpr (kNorm) weighted += g * ((load(x, row * columns + c) - mean[row]) * rstd[row]);
  }
  if constexpr (kNorm) {
    parts[2 * block * columns + c] = weighted;
    parts[(2 * block + 1) * columns + c] = sum;
  } else {
    parts[block * columns + c] = sum;
  }
}

// Adds the sums of blocks, `stride` apart, pairwise in place; all levels of 32 columns are one
// block's, so a barrier separates them.
__global__ void __launch_bounds__(kFinishColumns* kFinishRows)
    finish_columns_kernel(float* out, float* parts, int64_t blocks, int64_t stride, int64_t columns,
                          bool accumulate) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kFinishColumns + threadIdx.x;
  for (int64_t step = 1; step < blocks; step *= 2) {
    for (int64_t i = 2 * step * threadIdx.y; i + step < blocks; i += 2 * step * kFinishRows) {
      if (c < columns) parts[i * stride + c] += parts[(i + step) * stride + c];
    }
    __syncthreads();
  }
  if (threadIdx.y == 0 && c < columns) out[c] = accumulate ? out[c] + parts[c] : parts[c];
}

// Of rows; at least one, so that a sum over no rows is written too.
int64_t row_blocks(int64_t rows) {
  return rows == 0 ? 1 : quotient_up(rows, kRowBlock);
}

void finish_columns(float* out, float* parts, int64_t blocks, int64_t stride, int64_t columns,
                    bool accumulate, StreamHandle stream) {
  const dim3 grid(static_cast<unsigned>(quotient_up(columns, kFinishColumns)));
  launch({"finish_columns", grid, dim3(kFinishColumns, kFinishRows), stream}, finish_columns_kernel,
         out, parts, blocks, stride, columns, accumulate);
}

template <bool kNorm>
void column_parts(float* parts, In dy, In x, const float* mean, const float* rstd, int64_t rows,
                  int64_t columns, StreamHandle stream) {
  const int64_t tiles = quotient_up(columns, kPartThreads);
  const dim3 grid(static_cast<unsigned>(tiles * row_blocks(rows)));
  launch({"column_parts", grid, dim3(kPartThreads), stream}, column_parts_kernel<kNorm>, parts, dy,
         x, mean, rstd, rows, columns, tiles);
}

}  // namespace

void layer_norm_forward(Out y, float* mean, float* rstd, In x, In weight, In bias, float eps,
                        int64_t rows, int64_t columns, StreamHandle stream) {
  if (rows == 0) return;
  const int size = team_size(columns);
  launch(per_row("layer_norm_forward", rows, size, stream), layer_norm_forward_kernel, y, mean,
         rstd, x, weight, bias, eps, rows, columns, size);
}

size_t layer_norm_backward_workspace(int64_t rows, int64_t columns) {
  return static_cast<size_t>(2 * row_blocks(rows) * columns) * sizeof(float);
}

void layer_norm_backward(const LayerNormGradients& gradients, In dy, In x, In weight,
                         const float* mean, const float* rstd, int64_t rows, int64_t columns,
                         void* workspace, StreamHandle stream) {
  if (columns == 0) return;
  // The sums over rows come first: dx may be the memory of dy or x.
  float* parts = static_cast<float*>(workspace);
  column_parts<true>(parts, dy, x, mean, rstd, rows, columns, stream);
  finish_columns(gradients.dweight, parts, row_blocks(rows), 2 * columns, columns,
                 gradients.accumulate_weight, stream);
  if (gradients.dbias) {
    finish_columns(gradients.dbias, parts + columns, row_blocks(rows), 2 * columns, columns,
                   gradients.accumulate_bias, stream);
  }
  if (rows == 0) return;
  const int size = team_size(columns);
  launch(per_row("layer_norm_backward", rows, size, stream), layer_norm_backward_kernel,
         gradients.dx, dy, x, weight, mean, rstd, rows, columns, size);
}

size_t column_sum_workspace(int64_t rows, int64_t columns) {
  return static_cast<size_t>(row_blocks(rows) * columns) * sizeof(float);
}

void column_sum(float* out, In in, bool accumulate, int64_t rows, int64_t columns, void* workspace,
                StreamHandle stream) {
  if (columns == 0) return;
  float* parts = static_cast<float*>(workspace);
  column_parts<false>(parts, in, {}, nullptr, nullptr, rows, columns, stream);
  finish_columns(out, parts, row_blocks(rows), columns, columns, accumulate, stream);
}

}  // namespace shardrun::cuda
