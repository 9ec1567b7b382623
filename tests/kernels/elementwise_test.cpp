// Elementwise kernels against double, at every level.
#include "kernels/elementwise.h"

#include <gtest/gtest.h>

#include "kernels/math/functions.h"
#include "kernels/math/philox.h"
#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

using kernels::add;
using kernels::cast;
using kernels::gelu_backward;
using kernels::gelu_forward;

double gelu(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double gelu_derivative(double x) {
  const double t = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

TEST(Elementwise, CastBetweenAllTypes) {
  for (Dtype from : kFloating) {
    for (Dtype to : kFloating) {
      for (int64_t n : kSizes) {
        const Array x = Array::normal(from, {n}, 1, 100);
        const std::vector<Array> y = same_everywhere([&](Stream& stream) {
          Array out(to, {n}, 1);
          cast(out.tensor(), x.tensor(), stream);
          return std::vector<Array>{out};
        });
        for (int64_t i = 0; i < n; ++i) {
          Array one(to, {1});
          one.set(0, static_cast<float>(x[i]));
          ASSERT_EQ(y[0][i], one[0]);
        }
      }
    }
  }
}

// All bit patterns of a 16-bit type, and through fp32 a stretch that crosses every exponent: what
// the conversion instructions give must be what the functors give.
TEST(Elementwise, CastOfEveryBitPattern) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    std::vector<uint16_t> all(0x10000);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    const ConstTensor x(all.data(), dtype, {0x10000});
    const std::vector<Array> wide = same_everywhere([&](Stream& stream) {
      Array out(Dtype::fp32, {0x10000});
      cast(out.tensor(), x, stream);
      return std::vector<Array>{out};
    });
    for (int64_t i = 0; i < 0x10000; ++i) {
      const float want = static_cast<float>(get(all.data(), dtype, i));
      ASSERT_EQ(math::bits_of(wide[0].tensor().as<float>()[i]), math::bits_of(want)) << i;
    }
  }
  std::vector<float> values;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4093) {
    values.push_back(math::float_of(static_cast<uint32_t>(bits)));
  }
  const int64_t n = static_cast<int64_t>(values.size());
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    const std::vector<Array> narrow = same_everywhere([&](Stream& stream) {
      Array out(dtype, {n});
      cast(out.tensor(), ConstTensor(values.data(), Dtype::fp32, {n}), stream);
      return std::vector<Array>{out};
    });
    Array want(dtype, {n});
    for (int64_t i = 0; i < n; ++i) want.set(i, values[static_cast<size_t>(i)]);
    ASSERT_TRUE(narrow[0].same_bits(want));
  }
}

TEST(Elementwise, Add) {
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const Array a = Array::normal(dtype, {n}, 1), b = Array::normal(Dtype::fp32, {n}, 2);
      const std::vector<Array> y = same_everywhere([&](Stream& stream) {
        Array out(dtype, {n});
        add(out.tensor(), a.tensor(), b.tensor(), stream);
        return std::vector<Array>{out};
      });
      for (int64_t i = 0; i < n; ++i) expect_close(y[0][i], a[i] + b[i], dtype, 0x1p-23, 0, i);
    }
  }
}

TEST(Elementwise, OutputMayBeTheInput) {
  for (Dtype dtype : kFloating) {
    const Array a = Array::normal(dtype, {4099}, 1);
    const std::vector<Array> y = same_everywhere([&](Stream& stream) {
      Array apart(dtype, {4099}), inside = a;
      gelu_forward(apart.tensor(), a.tensor(), stream);
      gelu_forward(inside.tensor(), inside.tensor(), stream);
      EXPECT_TRUE(apart.same_bits(inside));
      Array sum(dtype, {4099}), twice = a;
      add(sum.tensor(), a.tensor(), a.tensor(), stream);
      add(twice.tensor(), twice.tensor(), twice.tensor(), stream);
      EXPECT_TRUE(sum.same_bits(twice));
      return std::vector<Array>{apart, sum};
    });
  }
}

TEST(Elementwise, Gelu) {
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const Array x = Array::normal(dtype, {n}, 3, 2), dy = Array::normal(dtype, {n}, 4);
      const std::vector<Array> y = same_everywhere([&](Stream& stream) {
        Array out(dtype, {n}), dx(dtype, {n});
        gelu_forward(out.tensor(), x.tensor(), stream);
        gelu_backward(dx.tensor(), dy.tensor(), x.tensor(), stream);
        return std::vector<Array>{out, dx};
      });
      for (int64_t i = 0; i < n; ++i) {
        // Relative: the reference itself loses digits where 1 + tanh cancels, hence the scale.
        expect_close(y[0][i], gelu(x[i]), dtype, 4e-6, 1e-8, i);
        expect_close(y[1][i], dy[i] * gelu_derivative(x[i]), dtype, 4e-6, 0.1, i);
      }
    }
  }
}

TEST(Elementwise, DropoutKeepsItsRateAndItsDraws) {
  const RandomKey key = random_key(7, Purpose::dropout, hash_name("block3.mlp"), 5, 2);
  for (Dtype dtype : kFloating) {
    for (float p : {0.0f, 0.1f, 0.5f, 0.9f}) {
      const int64_t n = 70001;
      Array x(dtype, {n});
      for (int64_t i = 0; i < n; ++i) x.set(i, 1);
      const std::vector<Array> y = same_everywhere([&](Stream& stream) {
        Array out(dtype, {n});
        kernels::dropout(out.tensor(), x.tensor(), p, key, stream);
        return std::vector<Array>{out};
      });
      int64_t kept = 0;
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t draw = math::draw(key, static_cast<uint64_t>(i));
        const bool keep = static_cast<double>(draw) >= static_cast<double>(p) * 0x1p32;
        kept += keep;
        expect_close(y[0][i], keep ? 1 / (1 - static_cast<double>(p)) : 0, dtype, 0x1p-23, 0, i);
      }
      // Five standard deviations of the binomial distribution.
      const double q = 1 - static_cast<double>(p), mean = static_cast<double>(n) * q;
      EXPECT_LE(std::abs(static_cast<double>(kept) - mean), 5 * std::sqrt(mean * (1 - q)) + 0.5);
    }
  }
}

TEST(Elementwise, RandomNormal) {
  const RandomKey key = random_key(1, Purpose::init, hash_name("wte"), 0, 0);
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const std::vector<Array> y = same_everywhere([&](Stream& stream) {
        Array out(dtype, {n});
        kernels::random_normal(out.tensor(), 1.0f, 0.5f, key, 0, stream);
        return std::vector<Array>{out};
      });
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < n; ++i) {
        const float z = math::normal_from_draw(math::draw(key, static_cast<uint64_t>(i)));
        expect_close(y[0][i], 1.0 + 0.5 * static_cast<double>(z), dtype, 0x1p-23, 1, i);
        sum += y[0][i] - 1;
        squares += (y[0][i] - 1) * (y[0][i] - 1);
      }
      if (n < 70000) continue;
      const double count = static_cast<double>(n);
      EXPECT_NEAR(sum / count, 0, 5 * 0.5 / std::sqrt(count));
      EXPECT_NEAR(squares / count, 0.25, 5 * 0.25 * std::sqrt(2 / count));
    }
  }
}

TEST(Elementwise, FillAndCopy) {
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const std::vector<Array> y = same_everywhere([&](Stream& stream) {
        Array a(dtype, {n}), b(dtype, {n});
        kernels::fill(a.tensor(), 1.5f, stream);
        kernels::copy_bytes(b.tensor(), a.tensor(), stream);
        return std::vector<Array>{a, b};
      });
      EXPECT_TRUE(y[0].same_bits(y[1]));
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(y[0][i], 1.5);
    }
  }
}

TEST(Elementwise, CountsAndChecksWithoutMemory) {
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, Isa::baseline, &pool);
  const Tensor y(nullptr, Dtype::bf16, {3, 5});
  add(y, y, y, meta);
  EXPECT_EQ(meta.work().flops, 15);
  EXPECT_EQ(meta.work().bytes, 3 * 30);
  EXPECT_THROW(add(y, y, Tensor(nullptr, Dtype::bf16, {4, 5}), meta), Error);
  EXPECT_THROW(add(y, y, Tensor(nullptr, Dtype::int32, {3, 5}), meta), Error);
}

}  // namespace
}  // namespace shardrun
