// Softmax cross entropy. A row is read twice forward, once backward; nothing of its size is kept.
#include "kernels/cuda/rows.h"
#include "kernels/math/functions.h"

namespace shardrun::cuda {

namespace {

__global__ void __launch_bounds__(kThreads)
    lse_kernel(float* lse, In logits, int64_t vocabulary, int64_t rows, int64_t columns, int size) {
  __shared__ WarpNumbers numbers;
  const RowTeam team = row_team(size, rows);
  const int64_t at = team.row * columns;
  const float max =
      row_max(numbers, team, vocabulary, [&](int64_t i) { return load(logits, at + i); });
  const float total = row_sum(numbers, team, vocabulary,
                              [&](int64_t i) { return math::exp(load(logits, at + i) - max); });
  if (team.has_row && team.member == 0 && team.lane == 0) lse[team.row] = max + math::log(total);
}

// One block: the losses of all rows are summed like one row.
__global__ void __launch_bounds__(kThreads)
    loss_kernel(float* loss_sum, int64_t* valid, const float* lse, In logits,
                const int32_t* targets, int64_t rows, int64_t columns) {
  __shared__ WarpNumbers numbers;
  __shared__ Shared<int64_t, kWarps> counts;
  const RowTeam team = row_team(kWarps, 1);
  int64_t count = 0;
  const float total = row_sum(numbers, team, rows, [&](int64_t row) {
    if (targets[row] < 0) return 0.0f;
    ++count;
    return lse[row] - load(logits, row * columns + targets[row]);
  });
  long long all = warp_sum(static_cast<long long>(count));
  if (team.lane == 0) counts[team.member] = all;
  __syncthreads();
  if (threadIdx.x == 0) {
    all = 0;
    for (int w = 0; w < kWarps; ++w) all += counts[w];
    *loss_sum = total;
    *valid = all;
  }
}

__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(Out dlogits, In logits, const float* lse, const int32_t* targets,
                                  int64_t vocabulary, float scale, int64_t rows, int64_t columns,
                                  int64_t per_row) {
  const int64_t item = global_thread();
  const int64_t row = item / per_row;
  if (row >= rows) return;
  const int64_t c = kVector * (item % per_row);
  const int64_t target = targets[row];
  const float row_lse = lse[row];
  Eight x;
  load(x, logits, row * columns + c, count_from(c, columns));
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float p = math::exp(x.x[k] - row_lse);
    const float d = c + k == target ? scale * (p - 1.0f) : scale * p;
    x.x[k] = target >= 0 && c + k < vocabulary ? d : 0.0f;
  }
  store(dlogits, row * columns + c, x, count_from(c, columns));
}

}  // namespace

void cross_entropy_forward(float* loss_sum, int64_t* valid, float* lse, In logits,
                           const int32_t* targets, int64_t vocabulary, int64_t rows,
                           int64_t columns, StreamHandle stream) {
  const int size = team_size(vocabulary);
  if (rows > 0) {
    launch(per_row("lse", rows, size, stream), lse_kernel, lse, logits, vocabulary, rows, columns,
           size);
  }
  launch({"loss", dim3(1), dim3(kThreads), stream}, loss_kernel, loss_sum, valid, lse, logits,
         targets, rows, columns);
}

void cross_entropy_backward(Out dlogits, In logits, const float* lse, const int32_t* targets,
                            int64_t vocabulary, float scale, int64_t rows, int64_t columns,
                            StreamHandle stream) {
  const int64_t per_row = quotient_up(columns, kVector);
  if (rows * per_row == 0) return;
  launch(per_thread("cross_entropy_backward", rows * per_row, stream),
         cross_entropy_backward_kernel, dlogits, logits, lse, targets, vocabulary, scale, rows,
         columns, per_row);
}

}  // namespace shardrun::cuda
