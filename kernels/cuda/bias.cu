// A bias added to rows.
#include "kernels/cuda/bias.h"

#include "kernels/cuda/elements.h"

namespace shardrun::cuda {

namespace {

__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(Out out, In x, In bias, int64_t rows, int64_t columns, int64_t per_row) {
  const int64_t item = global_thread();
  const int64_t row = item / per_row;
  if (row >= rows) return;
  const int64_t c = kVector * (item % per_row);
  const int count = count_from(c, columns);
  Eight sum{}, more{};
  if (x.data) load(sum, x, row * columns + c, count);
  if (bias.data) load(more, bias, c, count);
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum.x[k] = sum.x[k] + more.x[k];
  store(out, row * columns + c, sum, count);
}

}  // namespace

void add_bias(Out out, In x, In bias, int64_t rows, int64_t columns, StreamHandle stream) {
  const int64_t per_row = quotient_up(columns, kVector);
  if (rows * per_row == 0) return;
  launch(per_thread("add_bias", rows * per_row, stream), add_bias_kernel, out, x, bias, rows,
         columns, per_row);
}

}  // namespace shardrun::cuda
