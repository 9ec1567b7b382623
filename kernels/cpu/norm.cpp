// Layer norm and sums over columns.
//
// [Note: sums over rows] A sum over many rows is cut into blocks of 64 rows, added top to bottom;
// the sums of blocks are added pairwise, neighbours first. Blocks are tasks, and their sums lie
// behind the row buffers in the scratch memory of thread 0, asked for at its full size before the
// tasks start.
#include "kernels/cpu/lanes.h"
#include "kernels/math/functions.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

constexpr int64_t kRowBlock = 64;
constexpr int64_t kColumnsPerTask = 256;

// The whole row in fp32.
HD const float* read_row(In in, int64_t begin, int64_t n, float* buffer) {
  if (in.dtype == Dtype::fp32) return static_cast<const float*>(in.data) + begin;
  for (int64_t i = 0; i < n; i += kBlock) read(in, begin + i, smaller(kBlock, n - i), buffer + i);
  return buffer;
}

HD float* place_row(Out out, int64_t begin, float* buffer) {
  return place(out, begin, buffer);
}

// Room for `count` rows in the scratch memory of a thread.
HD float* row_buffers(ThreadPool& pool, int thread, int64_t count, int64_t columns) {
  return static_cast<float*>(
      pool.scratch(thread, static_cast<size_t>(count * columns) * sizeof(float)));
}

// Sums `parts` rows of `columns` numbers, `stride` apart, pairwise into the first.
HD void sum_pairwise(float* parts, int64_t count, int64_t stride, int64_t columns) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t i = 0; i + step < count; i += 2 * step) {
      float* a = parts + i * stride;
      const float* b = parts + (i + step) * stride;
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) a[c] += b[c];
    }
  }
}

// out = total, or out + total.
HD void deliver(float* out, const float* total, bool accumulate, int64_t n) {
  for (int64_t c = 0; c < n; ++c) out[c] = accumulate ? out[c] + total[c] : total[c];
}

// Sums the block sums [blocks, stride] pairwise, columns [first, first + width) of each, in
// parallel.
void finish_columns(float* out, float* parts, int64_t blocks, int64_t stride, int64_t columns,
                    bool accumulate, ThreadPool& pool) {
  for_tasks(pool, quotient_up(columns, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask;
    const int64_t width = smaller(kColumnsPerTask, columns - first);
    sum_pairwise(parts + first, blocks, stride, width);
    deliver(out + first, parts + first, accumulate, width);
  });
}

void layer_norm_forward(Out y, float* mean, float* rstd, In x, In weight, In bias, float eps,
                        int64_t rows, int64_t columns, ThreadPool& pool) {
  for_rows(pool, rows, columns, [&](int64_t first, int64_t last, int thread) {
    float* scratch = row_buffers(pool, thread, 4, columns);
    const float* w = read_row(weight, 0, columns, scratch);
    const float* b = bias.data ? read_row(bias, 0, columns, scratch + columns) : nullptr;
    const float inverse = 1.0f / static_cast<float>(columns);
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * columns;
      const float* in = read_row(x, at, columns, scratch + 2 * columns);
      const float m = row_sum(in, in, columns, [](auto v, auto) { return v; }) * inverse;
      const float variance =
          row_sum(in, in, columns, [m](auto v, auto) { return (v - m) * (v - m); }) * inverse;
      const float r = 1.0f / math::sqrt(variance + eps);
      mean[row] = m;
      rstd[row] = r;
      float* out = place_row(y, at, scratch + 3 * columns);
      if (b) {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) out[c] = (in[c] - m) * r * w[c] + b[c];
      } else {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) out[c] = (in[c] - m) * r * w[c];
      }
      write(y, at, out, columns);
    }
  });
}

// One row: dx, and the row's part of the sums for weight and bias.
HD void layer_norm_backward_row(float* dx, float* dweight, float* dbias, float* weighted,
                                float* normal, const float* dy, const float* x, const float* w,
                                float mean, float rstd, int64_t columns) {
#pragma GCC ivdep
  for (int64_t c = 0; c < columns; ++c) {
    const float g = dy[c];
    const float n = (x[c] - mean) * rstd;
    normal[c] = n;
    weighted[c] = g * w[c];
    dweight[c] += g * n;
    dbias[c] += g;
  }
  const float inverse = 1.0f / static_cast<float>(columns);
  const float a = row_sum(weighted, weighted, columns, [](auto v, auto) { return v; }) * inverse;
  const float b =
      row_sum(weighted, normal, columns, [](auto v, auto n) { return v * n; }) * inverse;
#pragma GCC ivdep
  for (int64_t c = 0; c < columns; ++c) dx[c] = rstd * ((weighted[c] - a) - normal[c] * b);
}

void layer_norm_backward(const LayerNormGradients& gradients, In dy, In x, In weight,
                         const float* mean, const float* rstd, int64_t rows, int64_t columns,
                         ThreadPool& pool) {
  constexpr int64_t kRowBuffers = 6;
  const int64_t blocks = larger(1, quotient_up(rows, kRowBlock));
  const int64_t stride = 2 * columns;
  float* parts = row_buffers(pool, 0, kRowBuffers + 2 * blocks, columns) + kRowBuffers * columns;
  for_tasks(pool, blocks, [&](int64_t block, int thread) {
    float* scratch = row_buffers(pool, thread, kRowBuffers, columns);
    const float* w = read_row(weight, 0, columns, scratch);
    float* dweight = parts + block * stride;
    float* dbias = dweight + columns;
    __builtin_memset(dweight, 0, static_cast<size_t>(stride) * sizeof(float));
    const int64_t last = smaller(rows, (block + 1) * kRowBlock);
    for (int64_t row = block * kRowBlock; row < last; ++row) {
      const int64_t at = row * columns;
      const float* g = read_row(dy, at, columns, scratch + columns);
      const float* in = read_row(x, at, columns, scratch + 2 * columns);
      float* out = place_row(gradients.dx, at, scratch + 3 * columns);
      layer_norm_backward_row(out, dweight, dbias, scratch + 4 * columns, scratch + 5 * columns, g,
                              in, w, mean[row], rstd[row], columns);
      write(gradients.dx, at, out, columns);
    }
  });
  finish_columns(gradients.dweight, parts, blocks, stride, columns, gradients.accumulate_weight,
                 pool);
  if (gradients.dbias) {
    finish_columns(gradients.dbias, parts + columns, blocks, stride, columns,
                   gradients.accumulate_bias, pool);
  }
}

void column_sum(float* out, In in, bool accumulate, int64_t rows, int64_t columns,
                ThreadPool& pool) {
  const int64_t blocks = larger(1, quotient_up(rows, kRowBlock));
  float* parts = row_buffers(pool, 0, 1 + blocks, columns) + columns;
  for_tasks(pool, blocks, [&](int64_t block, int thread) {
    float* buffer = row_buffers(pool, thread, 1, columns);
    float* sum = parts + block * columns;
    __builtin_memset(sum, 0, static_cast<size_t>(columns) * sizeof(float));
    const int64_t last = smaller(rows, (block + 1) * kRowBlock);
    for (int64_t row = block * kRowBlock; row < last; ++row) {
      const float* x = read_row(in, row * columns, columns, buffer);
#pragma GCC ivdep
      for (int64_t c = 0; c < columns; ++c) sum[c] += x[c];
    }
  });
  finish_columns(out, parts, blocks, columns, columns, accumulate, pool);
}

}  // namespace

void fill_norm(Table& table) {
  table.layer_norm_forward = layer_norm_forward;
  table.layer_norm_backward = layer_norm_backward;
  table.column_sum = column_sum;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
