// One element of the AdamW update; the formula is in kernels/adamw.h.
#pragma once

#include "kernels/math/functions.h"

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

// All scalars of a range, formed in fp64 and rounded once.
struct AdamwStep {
  float beta1, beta2;
  float rest1, rest2;                  // 1 - beta
  float inverse_bias1, inverse_bias2;  // 1 / (1 - beta^t)
  float eps;
  float gradient_factor;
  float lr;  // times the range's factor
  float decay;

  HD void operator()(float& p, float& m, float& v, float gradient) const {
    const float g = gradient * gradient_factor;
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * (g * g);
    const float update = (m * inverse_bias1) / (sqrt(v * inverse_bias2) + eps);
    p = p - lr * (update + decay * p);
  }
};

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
