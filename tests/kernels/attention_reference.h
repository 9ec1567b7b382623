// Attention in double, with the dropout mask drawn again element by element, and what a kernel's
// results may differ from it.
#pragma once

#include <gtest/gtest.h>

#include "kernels/attention.h"
#include "kernels/math/philox.h"
#include "tests/kernels/reference.h"

namespace shardrun {

struct AttentionCase {
  int64_t batch, time, heads, size;
  Dtype dtype;
  bool causal;
  float dropout;

  kernels::AttentionOptions options() const {
    return {heads, causal, dropout, random_key(7, Purpose::dropout, 11, 13, 17)};
  }
  int64_t columns() const { return heads * size; }
};

struct AttentionResult {
  Array out, lse, dqkv;
};

// One head in double, every value with a bound of the error that the kernel may make.
class AttentionReference {
 public:
  AttentionReference(const AttentionCase& t, const Array& qkv, const Array& dout, int64_t b,
                     int64_t h)
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

  void check_forward(const AttentionResult& r) const {
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

  void check_backward(const AttentionResult& r) const {
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

  const AttentionCase& t_;
  const Array &qkv_, &dout_;
  int64_t b_, h_;
  std::vector<double> probs_, mask_, lse_;
};

// Every head of a result.
inline void check_attention(const AttentionCase& t, const Array& qkv, const Array& dout,
                            const AttentionResult& r) {
  for (int64_t b = 0; b < t.batch; ++b) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const AttentionReference reference(t, qkv, dout, b, h);
      reference.check_forward(r);
      reference.check_backward(r);
    }
  }
}

}  // namespace shardrun
