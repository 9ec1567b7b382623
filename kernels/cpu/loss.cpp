// Softmax cross entropy. A row is read twice forward, once backward; nothing of its size is kept.
#include "kernels/cpu/lanes.h"
#include "kernels/math/functions.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

// A NaN is not seen here; it reaches the result through the sum of exponentials.
HD float row_max(In logits, int64_t at, int64_t n) {
  Buffer buffer;
  Vec v[kLanes / kWidth];
  float result = -__builtin_inff();
  for (int k = 0; k < kLanes / kWidth; ++k) v[k] = Vec{} + result;
  for (int64_t c = 0; c < n; c += kBlock) {
    const int64_t m = smaller(kBlock, n - c);
    const float* x = read(logits, at + c, m, buffer.x);
    int64_t i = 0;
    for (; i + kLanes <= m; i += kLanes) {
#pragma GCC unroll 8
      for (int k = 0; k < kLanes / kWidth; ++k) {
        const Vec u = load(x + i + k * kWidth);
        v[k] = u > v[k] ? u : v[k];
      }
    }
    for (; i < m; ++i) result = x[i] > result ? x[i] : result;
  }
  for (int k = 0; k < kLanes / kWidth; ++k) {
    for (int j = 0; j < kWidth; ++j) result = v[k][j] > result ? v[k][j] : result;
  }
  return result;
}

HD float row_lse(In logits, int64_t at, int64_t n) {
  const float max = row_max(logits, at, n);
  Buffer buffer, exponentials;
  float total = 0;
  for (int64_t c = 0; c < n; c += kBlock) {
    const int64_t m = smaller(kBlock, n - c);
    const float* x = read(logits, at + c, m, buffer.x);
    float* e = exponentials.x;
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) e[i] = math::exp(x[i] - max);
    total += row_sum(e, e, m, [](auto v, auto) { return v; });
  }
  return max + math::log(total);
}

void cross_entropy_forward(float* loss_sum, int64_t* valid, float* lse, In logits,
                           const int32_t* targets, int64_t vocabulary, int64_t rows,
                           int64_t columns, ThreadPool& pool) {
  for_rows(pool, rows, columns, [&](int64_t first, int64_t last, int) {
    for (int64_t row = first; row < last; ++row) {
      lse[row] = row_lse(logits, row * columns, vocabulary);
    }
  });
  Buffer losses;
  float total = 0;
  int64_t count = 0;
  for (int64_t chunk = 0; chunk < rows; chunk += kBlock) {
    const int64_t m = smaller(kBlock, rows - chunk);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t row = chunk + i;
      const bool counts = targets[row] >= 0;
      count += counts ? 1 : 0;
      losses.x[i] = counts ? lse[row] - read_one(logits, row * columns + targets[row]) : 0.0f;
    }
    total += row_sum(losses.x, losses.x, m, [](auto v, auto) { return v; });
  }
  *loss_sum = total;
  *valid = count;
}

void cross_entropy_backward(Out dlogits, In logits, const float* lse, const int32_t* targets,
                            int64_t vocabulary, float scale, int64_t rows, int64_t columns,
                            ThreadPool& pool) {
  for_rows(pool, rows, columns, [&](int64_t first, int64_t last, int) {
    Buffer buffer_in, buffer_out;
    for (int64_t row = first; row < last; ++row) {
      const int64_t target = targets[row];
      const float row_lse = lse[row];
      for (int64_t c = 0; c < columns; c += kBlock) {
        const int64_t m = smaller(kBlock, columns - c);
        const int64_t real = target < 0 ? 0 : larger(0, smaller(m, vocabulary - c));
        const float* x = read(logits, row * columns + c, real, buffer_in.x);
        float* d = place(dlogits, row * columns + c, buffer_out.x);
        const bool here = target >= c && target < c + m;
        const float at_target = here ? x[target - c] : 0.0f;
#pragma GCC ivdep
        for (int64_t i = 0; i < real; ++i) d[i] = scale * math::exp(x[i] - row_lse);
        for (int64_t i = real; i < m; ++i) d[i] = 0.0f;
        if (here) d[target - c] = scale * (math::exp(at_target - row_lse) - 1.0f);
        write(dlogits, row * columns + c, d, m);
      }
    }
  });
}

}  // namespace

void fill_loss(Table& table) {
  table.cross_entropy_forward = cross_entropy_forward;
  table.cross_entropy_backward = cross_entropy_backward;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
