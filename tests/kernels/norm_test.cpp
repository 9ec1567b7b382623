// Layer norm and column sums against double, at every level.
#include "kernels/norm.h"

#include <gtest/gtest.h>

#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

struct Size {
  int64_t rows, columns;
};
constexpr Size kShapes[] = {{0, 8}, {1, 1}, {3, 7}, {65, 31}, {129, 128}, {200, 768}, {67, 2500}};

struct Reference {
  std::vector<double> mean, rstd;
  Reference(const Array& x, Size s, double eps) {
    for (int64_t r = 0; r < s.rows; ++r) {
      double sum = 0, squares = 0;
      for (int64_t c = 0; c < s.columns; ++c) sum += x[r * s.columns + c];
      const double m = sum / static_cast<double>(s.columns);
      for (int64_t c = 0; c < s.columns; ++c) squares += std::pow(x[r * s.columns + c] - m, 2);
      mean.push_back(m);
      rstd.push_back(1 / std::sqrt(squares / static_cast<double>(s.columns) + eps));
    }
  }
};

TEST(LayerNorm, Forward) {
  for (Dtype dtype : kFloating) {
    for (Size s : kShapes) {
      for (bool with_bias : {true, false}) {
        const Array x = Array::normal(dtype, {s.rows, s.columns}, 1, 3);
        const Array weight = Array::normal(Dtype::fp32, {s.columns}, 2);
        const Array bias = Array::normal(dtype, {s.columns}, 3);
        const std::vector<Array> got = same_everywhere([&](Stream& stream) {
          Array y(dtype, {s.rows, s.columns}), mean(Dtype::fp32, {s.rows}),
              rstd(Dtype::fp32, {s.rows});
          kernels::layer_norm_forward(y.tensor(), mean.tensor(), rstd.tensor(), x.tensor(),
                                      weight.tensor(), with_bias ? bias.tensor() : ConstTensor(),
                                      1e-5f, stream);
          return std::vector<Array>{y, mean, rstd};
        });
        const Reference want(x, s, 1e-5);
        for (int64_t r = 0; r < s.rows; ++r) {
          const double m = want.mean[static_cast<size_t>(r)];
          const double rstd = want.rstd[static_cast<size_t>(r)];
          expect_close(got[1][r], m, Dtype::fp32, 1e-6, 3, r);
          // One column: variance zero up to the rounding of the mean.
          expect_close(got[2][r], rstd, Dtype::fp32, 2e-6, 0, r);
          for (int64_t c = 0; c < s.columns; ++c) {
            const int64_t i = r * s.columns + c;
            const double y = (x[i] - m) * rstd * weight[c] + (with_bias ? bias[c] : 0);
            expect_close(got[0][i], y, dtype, 4e-6, 3, i);
          }
        }
      }
    }
  }
}

TEST(LayerNorm, Backward) {
  for (Dtype dtype : kFloating) {
    for (Size s : kShapes) {
      for (bool accumulate : {false, true}) {
        const Array x = Array::normal(dtype, {s.rows, s.columns}, 1, 3);
        const Array dy = Array::normal(dtype, {s.rows, s.columns}, 2);
        const Array weight = Array::normal(dtype, {s.columns}, 3);
        const Array before = Array::normal(Dtype::fp32, {s.columns}, 4);
        const Reference stats(x, s, 1e-5);
        Array mean(Dtype::fp32, {s.rows}), rstd(Dtype::fp32, {s.rows});
        for (int64_t r = 0; r < s.rows; ++r) {
          mean.set(r, static_cast<float>(stats.mean[static_cast<size_t>(r)]));
          rstd.set(r, static_cast<float>(stats.rstd[static_cast<size_t>(r)]));
        }
        const std::vector<Array> got = same_everywhere([&](Stream& stream) {
          Array dx(dtype, {s.rows, s.columns}), dweight = before, dbias = before;
          kernels::layer_norm_backward(dx.tensor(), dweight.tensor(), dbias.tensor(), dy.tensor(),
                                       x.tensor(), weight.tensor(), mean.tensor(), rstd.tensor(),
                                       accumulate, !accumulate, stream);
          return std::vector<Array>{dx, dweight, dbias};
        });
        std::vector<double> dweight(static_cast<size_t>(s.columns)), dbias(dweight);
        for (int64_t r = 0; r < s.rows; ++r) {
          double sum_g = 0, sum_gn = 0;
          auto n = [&](int64_t c) { return (x[r * s.columns + c] - mean[r]) * rstd[r]; };
          auto g = [&](int64_t c) { return dy[r * s.columns + c] * weight[c]; };
          for (int64_t c = 0; c < s.columns; ++c) {
            sum_g += g(c);
            sum_gn += g(c) * n(c);
            dweight[static_cast<size_t>(c)] += dy[r * s.columns + c] * n(c);
            dbias[static_cast<size_t>(c)] += dy[r * s.columns + c];
          }
          const double count = static_cast<double>(s.columns);
          for (int64_t c = 0; c < s.columns; ++c) {
            const double want = rstd[r] * (g(c) - sum_g / count - n(c) * sum_gn / count);
            expect_close(got[0][r * s.columns + c], want, dtype, 4e-6, 4 * rstd[r], r);
          }
        }
        for (int64_t c = 0; c < s.columns; ++c) {
          const double scale = 4 * std::sqrt(static_cast<double>(s.rows)) + 1;
          expect_close(got[1][c], dweight[static_cast<size_t>(c)] + (accumulate ? before[c] : 0),
                       Dtype::fp32, 2e-6, scale, c);
          expect_close(got[2][c], dbias[static_cast<size_t>(c)] + (accumulate ? 0 : before[c]),
                       Dtype::fp32, 2e-6, scale, c);
        }
      }
    }
  }
}

TEST(LayerNorm, BackwardWithoutBiasGivesTheSameBits) {
  Runner run;
  const Array x = Array::normal(Dtype::bf16, {70, 33}, 1), weight(Dtype::fp32, {33});
  const Array mean = Array::normal(Dtype::fp32, {70}, 2),
              rstd = Array::normal(Dtype::fp32, {70}, 3);
  Array dx(Dtype::bf16, {70, 33}), dweight(Dtype::fp32, {33}), dbias(Dtype::fp32, {33});
  Array dx_alone = dx, dweight_alone = dweight;
  kernels::layer_norm_backward(dx.tensor(), dweight.tensor(), dbias.tensor(), x.tensor(),
                               x.tensor(), weight.tensor(), mean.tensor(), rstd.tensor(), false,
                               false, run.stream());
  kernels::layer_norm_backward(dx_alone.tensor(), dweight_alone.tensor(), Tensor(), x.tensor(),
                               x.tensor(), weight.tensor(), mean.tensor(), rstd.tensor(), false,
                               false, run.stream());
  EXPECT_TRUE(dx.same_bits(dx_alone));
  EXPECT_TRUE(dweight.same_bits(dweight_alone));
}

TEST(ColumnSum, BlocksOf64RowsThenPairwise) {
  for (Dtype dtype : kFloating) {
    for (Size s : kShapes) {
      const Array x = Array::normal(dtype, {s.rows, s.columns}, 5);
      const Array before = Array::normal(Dtype::fp32, {s.columns}, 6);
      const std::vector<Array> got = same_everywhere([&](Stream& stream) {
        Array sum(Dtype::fp32, {s.columns}), added = before;
        kernels::column_sum(sum.tensor(), x.tensor(), false, stream);
        kernels::column_sum(added.tensor(), x.tensor(), true, stream);
        return std::vector<Array>{sum, added};
      });
      for (int64_t c = 0; c < s.columns; ++c) {
        std::vector<float> parts;
        for (int64_t first = 0; first < s.rows; first += 64) {
          float sum = 0;
          for (int64_t r = first; r < std::min(s.rows, first + 64); ++r) {
            sum += static_cast<float>(x[r * s.columns + c]);
          }
          parts.push_back(sum);
        }
        while (parts.size() > 1) {
          std::vector<float> next;
          for (size_t i = 0; i < parts.size(); i += 2) {
            next.push_back(i + 1 < parts.size() ? parts[i] + parts[i + 1] : parts[i]);
          }
          parts = next;
        }
        const float want = parts.empty() ? 0 : parts[0];
        ASSERT_EQ(static_cast<float>(got[0][c]), want);
        ASSERT_EQ(static_cast<float>(got[1][c]), static_cast<float>(before[c]) + want);
      }
    }
  }
}

}  // namespace
}  // namespace shardrun
