// The differentiable ops in double, straight from their formulas, to take finite differences of.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/math/philox.h"
#include "runtime/random.h"

namespace shardrun::in_double {

using Numbers = std::vector<double>;

inline Numbers embedding(const std::vector<int32_t>& tokens, int64_t time, const Numbers& table,
                         const Numbers* positions, int64_t columns) {
  Numbers y;
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t t = static_cast<int64_t>(i) % time;
      y.push_back(table[tokens[i] * columns + c] + (positions ? (*positions)[t * columns + c] : 0));
    }
  }
  return y;
}

inline Numbers layer_norm(const Numbers& x, const Numbers& weight, const Numbers* bias) {
  const size_t columns = weight.size();
  Numbers y(x.size());
  for (size_t row = 0; row < x.size(); row += columns) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < columns; ++c) mean += x[row + c] / columns;
    for (size_t c = 0; c < columns; ++c) variance += std::pow(x[row + c] - mean, 2) / columns;
    for (size_t c = 0; c < columns; ++c) {
      y[row + c] = (x[row + c] - mean) / std::sqrt(variance + 1e-5) * weight[c] +
                   (bias ? (*bias)[c] : 0);
    }
  }
  return y;
}

// weight [out, in].
inline Numbers linear(const Numbers& x, const Numbers& weight, const Numbers* bias, size_t in) {
  const size_t out = weight.size() / in;
  Numbers y;
  for (size_t row = 0; row < x.size(); row += in) {
    for (size_t n = 0; n < out; ++n) {
      double sum = bias ? (*bias)[n] : 0;
      for (size_t k = 0; k < in; ++k) sum += x[row + k] * weight[n * in + k];
      y.push_back(sum);
    }
  }
  return y;
}

inline Numbers gelu(Numbers x) {
  const double factor = std::sqrt(2 / std::acos(-1.0));
  for (double& v : x) v = 0.5 * v * (1 + std::tanh(factor * (v + 0.044715 * v * v * v)));
  return x;
}

inline Numbers add(Numbers a, const Numbers& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

inline double kept(float p, RandomKey key, uint64_t element) {
  const bool keep = static_cast<double>(math::draw(key, element)) >= double{p} * 0x1p32;
  return keep ? 1 / (1 - double{p}) : 0;
}

inline Numbers dropout(Numbers x, float p, RandomKey key) {
  for (size_t i = 0; i < x.size(); ++i) x[i] *= kept(p, key, i);
  return x;
}

inline Numbers attention(const Numbers& qkv, int64_t batch, int64_t time, int64_t heads,
                         int64_t size, bool causal, float p, RandomKey key) {
  const int64_t columns = heads * size;
  Numbers y(batch * time * columns);
  const auto at = [&](int64_t b, int64_t t, int64_t part, int64_t h, int64_t d) {
    return qkv[((b * time + t) * 3 + part) * columns + h * size + d];
  };
  for (int64_t row = 0; row < batch * heads * time; ++row) {
    const int64_t b = row / (heads * time), h = row / time % heads, i = row % time;
    Numbers weights;
    double sum = 0;
    for (int64_t j = 0; j < (causal ? i + 1 : time); ++j) {
      double score = 0;
      for (int64_t d = 0; d < size; ++d) score += at(b, i, 0, h, d) * at(b, j, 1, h, d);
      weights.push_back(std::exp(score / std::sqrt(static_cast<double>(size))));
      sum += weights.back();
    }
    for (int64_t j = 0; j < static_cast<int64_t>(weights.size()); ++j) {
      double weight = weights[j] / sum;
      if (p > 0) weight *= kept(p, key, static_cast<uint64_t>(row * time + j));
      for (int64_t d = 0; d < size; ++d) {
        y[(b * time + i) * columns + h * size + d] += weight * at(b, j, 2, h, d);
      }
    }
  }
  return y;
}

// Sum over the rows whose target is not negative; columns past `vocabulary` do not exist.
inline double cross_entropy(const Numbers& logits, const std::vector<int32_t>& targets,
                            size_t vocabulary) {
  const size_t columns = logits.size() / targets.size();
  double loss = 0;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    double sum = 0;
    for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(logits[row * columns + v]);
    loss += std::log(sum) - logits[row * columns + targets[row]];
  }
  return loss;
}

}  // namespace shardrun::in_double
