// One matrix product, what it is made of, and how far its result may be from sums in double.
#pragma once

#include <gtest/gtest.h>

#include "tests/kernels/reference.h"

namespace shardrun {

struct MatmulCase {
  int64_t m, n, k;
  Dtype dtype, c_dtype, bias_dtype;
  bool transpose_a, transpose_b, bias, accumulate;
  int64_t offset;  // of every operand from an aligned address, in elements
  size_t workspace;

  std::string text() const {
    return fmt::format("{}x{}x{} {} -> {}{}{}{}{}, offset {}, workspace {}", m, n, k,
                       name_of(dtype), name_of(c_dtype), transpose_a ? " ta" : "",
                       transpose_b ? " tb" : "",
                       bias ? fmt::format(" bias {}", name_of(bias_dtype)) : "",
                       accumulate ? " accumulate" : "", offset, workspace);
  }
};

struct MatmulOperands {
  Array a, b, bias, before;  // before: what is in c, NaN where it must not be read

  explicit MatmulOperands(const MatmulCase& t)
      : a(normals(t.dtype, stored(t.m, t.k, t.transpose_a), 1, t.offset)),
        b(normals(t.dtype, stored(t.k, t.n, t.transpose_b), 2, t.offset)),
        bias(normals(t.bias_dtype, {t.n}, 3, t.offset)),
        before(normals(t.c_dtype, {t.m, t.n}, 4, t.offset)) {
    for (int64_t i = 0; !t.accumulate && i < before.numel(); ++i) {
      before.set(i, std::numeric_limits<float>::quiet_NaN());
    }
  }

  static Shape stored(int64_t rows, int64_t columns, bool transpose) {
    return transpose ? Shape{columns, rows} : Shape{rows, columns};
  }
  static Array normals(Dtype dtype, const Shape& shape, uint32_t seed, int64_t offset) {
    Array out(dtype, shape, offset);
    const Array values = Array::normal(dtype, shape, seed);
    for (int64_t i = 0; i < out.numel(); ++i) out.set(i, static_cast<float>(values[i]));
    return out;
  }
};

// Every `stride`-th element of c.
inline void check_matmul(const MatmulCase& t, const MatmulOperands& in, const Array& c,
                         int64_t stride = 1) {
  for (int64_t e = 0; e < t.m * t.n; e += stride) {
    const int64_t i = e / t.n, j = e % t.n;
    double want = 0, size = 0;
    for (int64_t p = 0; p < t.k; ++p) {
      const double product = in.a[t.transpose_a ? p * t.m + i : i * t.k + p] *
                             in.b[t.transpose_b ? j * t.k + p : p * t.n + j];
      want += product;
      size += std::abs(product);
    }
    for (double x : {t.bias ? in.bias[j] : 0.0, t.accumulate ? in.before[e] : 0.0}) {
      want += x;
      size += std::abs(x);
    }
    // Two more terms than K: the bias, and what was there.
    const double bound = 2 * static_cast<double>(t.k + 2) * 0x1p-24 * size +
                         unit_roundoff(t.c_dtype) * std::abs(want) * 1.01;
    ASSERT_LE(std::abs(c[e] - want), bound) << i << ", " << j;
  }
}

}  // namespace shardrun
