// Attention against a double reference, with the dropout mask drawn again element by element, and its
// gradient against finite differences.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include "kernels/math/philox.h"
#include "tests/kernels/isa_main.h"
#include "tests/kernels/reference.h"

namespace shardrun {
namespace {

struct Case {
  int64_t batch, time, heads, size;
  Dtype dtype;
  bool causal;
  float dropout;

  kernels::AttentionOptions options() const {
    return {heads, causal, dropout, random_key(7, Purpose::dropout, 11, 13, 17)};
  }
  int64_t columns() const { return heads * size; }
};

struct Result {
  Array out, lse, dqkv;
};

Result run(const Case& t, const Array& qkv, const Array& dout, int threads) {
  ThreadPool pool(threads);
  Stream stream(DeviceKind::cpu, test_isa(), &pool);
  Result r = {Array(t.dtype, {t.batch, t.time, t.columns()}),
              Array(Dtype::fp32, {t.batch, t.heads, t.time}),
              Array(t.dtype, {t.batch, t.time, 3 * t.columns()})};
  kernels::attention_forward(r.out.tensor(), r.lse.tensor(), qkv.tensor(), t.options(), stream);
  kernels::attention_backward(r.dqkv.tensor(), dout.tensor(), r.out.tensor(), qkv.tensor(),
                              r.lse.tensor(), t.options(), stream);
  return r;
}

// One head in double, every value with a bound of the error that the kernel may make.
class Reference {
 public:
  Reference(const Case& t, const Array& qkv, const Array& dout, int64_t b, int64_t h)
      : t_(t), qkv_(qkv), dout_(dout), b_(b), h_(h), probs_(square()), mask_(square()) {
    const double scale = 1 / std::sqrt(static_cast<double>(t.size));
    const auto options = t.options();
    const double threshold = static_cast<double>(t.dropout) * 0x1p32;
    for (int64_t i = 0; i < t.time; ++i) {
      const int64_t keys = t.causal ? i + 1 : t.time;
      double sum = 0;
      for (int64_t j = 0; j < keys; ++j) {
        double score = 0;
        for (int64_t d = 0; d < t.size; ++d) score += q(i, d) * k(j, d);
        probs_[at(i, j)] = std::exp(score * scale);
        sum += probs_[at(i, j)];
        const auto element = static_cast<uint64_t>(((b * t.heads + h) * t.time + i) * t.time + j);
        const bool kept = static_cast<double>(math::draw(options.key, element)) >= threshold;
        mask_[at(i, j)] = kept ? 1 / (1 - static_cast<double>(t.dropout)) : 0.0;
      }
      for (int64_t j = 0; j < keys; ++j) probs_[at(i, j)] /= sum;
      lse_.push_back(std::log(sum));
    }
  }

  void check_forward(const Result& r) const {
    for (int64_t i = 0; i < t_.time; ++i) {
      ASSERT_NEAR(r.lse[(b_ * t_.heads + h_) * t_.time + i], lse_[i],
                  2e-6 * (1 + std::abs(lse_[i])));
      for (int64_t d = 0; d < t_.size; ++d) {
        double want = 0, size = 0;
        for (int64_t j = 0; j < t_.time; ++j) {
          const double term = probs_[at(i, j)] * mask_[at(i, j)] * v(j, d);
          want += term;
          size += std::abs(term);
        }
        const double got = r.out[(b_ * t_.time + i) * t_.columns() + h_ * t_.size + d];
        ASSERT_LE(std::abs(got - want), bound(want, size)) << "out " << i << ", " << d;
      }
    }
  }

  void check_backward(const Result& r) const {
    const double scale = 1 / std::sqrt(static_cast<double>(t_.size));
    std::vector<double> ds = square(), ds_size = square();
    for (int64_t i = 0; i < t_.time; ++i) {
      std::vector<double> dp(t_.time), dp_size(t_.time);
      double delta = 0, delta_size = 0;
      for (int64_t j = 0; j < t_.time; ++j) {
        for (int64_t d = 0; d < t_.size; ++d) {
          dp[j] += dout(i, d) * v(j, d) * mask_[at(i, j)];
          dp_size[j] += std::abs(dout(i, d) * v(j, d)) * mask_[at(i, j)];
        }
        delta += probs_[at(i, j)] * dp[j];
        delta_size += probs_[at(i, j)] * dp_size[j];
      }
      for (int64_t j = 0; j < t_.time; ++j) {
        ds[at(i, j)] = scale * probs_[at(i, j)] * (dp[j] - delta);
        ds_size[at(i, j)] = scale * probs_[at(i, j)] * (dp_size[j] + delta_size);
      }
    }
    for (int64_t i = 0; i < t_.time; ++i) {
      for (int64_t d = 0; d < t_.size; ++d) {
        double want[3] = {}, size[3] = {};
        const auto add = [&](int part, double factor, double factor_size, double x) {
          want[part] += factor * x;
          size[part] += factor_size * std::abs(x);
        };
        for (int64_t j = 0; j < t_.time; ++j) {
          const double kept = probs_[at(j, i)] * mask_[at(j, i)];
          add(0, ds[at(i, j)], ds_size[at(i, j)], k(j, d));
          add(1, ds[at(j, i)], ds_size[at(j, i)], q(j, d));
          add(2, kept, kept, dout(j, d));
        }
        for (int part = 0; part < 3; ++part) {
          const double got = r.dqkv[index(i, part, d)];
          ASSERT_LE(std::abs(got - want[part]), bound(want[part], size[part]))
              << "dqkv part " << part << " at " << i << ", " << d << " got " << got;
        }
      }
    }
  }

 private:
  double bound(double want, double size) const {
    const double stored = unit_roundoff(t_.dtype);
    const double denormal = t_.dtype == Dtype::fp16 ? 0x1p-25 : 0;  // half of the smallest step
    return (2e-5 + (t_.dtype == Dtype::fp32 ? 0 : stored)) * size + 1.01 * stored * std::abs(want) +
           denormal;
  }
  std::vector<double> square() const { return std::vector<double>(t_.time * t_.time); }
  int64_t at(int64_t i, int64_t j) const { return i * t_.time + j; }
  int64_t index(int64_t i, int64_t part, int64_t d) const {
    return ((b_ * t_.time + i) * 3 + part) * t_.columns() + h_ * t_.size + d;
  }
  double q(int64_t i, int64_t d) const { return qkv_[index(i, 0, d)]; }
  double k(int64_t i, int64_t d) const { return qkv_[index(i, 1, d)]; }
  double v(int64_t i, int64_t d) const { return qkv_[index(i, 2, d)]; }
  double dout(int64_t i, int64_t d) const {
    return dout_[(b_ * t_.time + i) * t_.columns() + h_ * t_.size + d];
  }

  const Case& t_;
  const Array &qkv_, &dout_;
  int64_t b_, h_;
  std::vector<double> probs_, mask_, lse_;
};

void check(const Case& t) {
  SCOPED_TRACE(fmt::format("B {} T {} H {} D {} {}{} dropout {}", t.batch, t.time, t.heads, t.size,
                           name_of(t.dtype), t.causal ? " causal" : "", t.dropout));
  const Array qkv = Array::normal(t.dtype, {t.batch, t.time, 3 * t.columns()}, 5);
  const Array dout = Array::normal(t.dtype, {t.batch, t.time, t.columns()}, 6);
  const Result r = run(t, qkv, dout, 2);
  for (int threads : {1, 3}) {
    const Result other = run(t, qkv, dout, threads);
    EXPECT_TRUE(r.out.same_bits(other.out)) << threads << " threads give other bits";
    EXPECT_TRUE(r.lse.same_bits(other.lse)) << threads << " threads give other bits";
    EXPECT_TRUE(r.dqkv.same_bits(other.dqkv)) << threads << " threads give other bits";
  }
  for (int64_t b = 0; b < t.batch; ++b) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const Reference reference(t, qkv, dout, b, h);
      reference.check_forward(r);
      reference.check_backward(r);
    }
  }
}

TEST(Attention, MatchesTheReference) {
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (bool causal : {true, false}) {
      for (float dropout : {0.0f, 0.25f}) {
        check({2, 33, 3, 16, dtype, causal, dropout});
        check({1, 130, 2, 64, dtype, causal, dropout});
        check({3, 1, 1, 8, dtype, causal, dropout});
        check({1, 7, 2, 5, dtype, causal, dropout});
      }
    }
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Case t = {1, 70, 1, 16, Dtype::fp32, true, 0};
  const Array qkv = Array::normal(t.dtype, {1, 70, 48}, 5, 100.0f);
  const Array dout = Array::normal(t.dtype, {1, 70, 16}, 6);
  const Result r = run(t, qkv, dout, 1);
  for (int64_t i = 0; i < r.out.numel(); ++i) ASSERT_TRUE(std::isfinite(r.out[i]));
  for (int64_t i = 0; i < r.dqkv.numel(); ++i) ASSERT_TRUE(std::isfinite(r.dqkv[i]));
}

TEST(Attention, GradientIsTheSlopeOfTheForwardPass) {
  for (float dropout : {0.0f, 0.5f}) {
    const Case t = {1, 19, 2, 8, Dtype::fp32, true, dropout};
    const Array qkv = Array::normal(t.dtype, {1, 19, 48}, 5);
    const Array dout = Array::normal(t.dtype, {1, 19, 16}, 6);
    const Result r = run(t, qkv, dout, 1);
    const auto loss = [&](const Array& at) {
      const Result moved = run(t, at, dout, 1);
      double sum = 0;
      for (int64_t i = 0; i < dout.numel(); ++i) sum += moved.out[i] * dout[i];
      return sum;
    };
    for (int64_t i = 0; i < qkv.numel(); i += 5) {
      constexpr float kStep = 1e-2f;
      Array up = qkv, down = qkv;
      up.set(i, static_cast<float>(qkv[i]) + kStep);
      down.set(i, static_cast<float>(qkv[i]) - kStep);
      const double slope = (loss(up) - loss(down)) / (up[i] - down[i]);
      ASSERT_NEAR(r.dqkv[i], slope, 1e-3 * (1 + std::abs(slope))) << "element " << i;
    }
  }
}

TEST(Attention, WrongArgumentsAreRefused) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::meta, test_isa(), &pool);
  const auto call = [&](const Shape& out, const Shape& lse, float dropout) {
    kernels::attention_forward(Tensor(nullptr, Dtype::bf16, out), Tensor(nullptr, Dtype::fp32, lse),
                               ConstTensor(nullptr, Dtype::bf16, {2, 4, 48}),
                               {.heads = 2, .dropout = dropout, .key = {}}, stream);
  };
  EXPECT_NO_THROW(call({2, 4, 16}, {2, 2, 4}, 0));
  EXPECT_GT(stream.work().flops, 0);
  EXPECT_THROW(call({2, 4, 48}, {2, 2, 4}, 0), InternalError);
  EXPECT_THROW(call({2, 4, 16}, {2, 4, 2}, 0), InternalError);
  EXPECT_THROW(call({2, 4, 16}, {2, 2, 4}, 1), InternalError);
}

}  // namespace
}  // namespace shardrun
