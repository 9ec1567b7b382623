// One element of the AdamW update; the formula is in kernels/adamw.h.
#pragma once

#include "kernels/adamw_scalars.h"
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

// On the host, for every device: powers in fp64 are the processor's.
__attribute__((always_inline)) inline AdamwStep adamw_step(const kernels::AdamwScalars& s,
                                                           const kernels::AdamwRange& range) {
  AdamwStep step;
  step.beta1 = static_cast<float>(s.beta1);
  step.beta2 = static_cast<float>(s.beta2);
  step.rest1 = static_cast<float>(1 - s.beta1);
  step.rest2 = static_cast<float>(1 - s.beta2);
  const double t = static_cast<double>(s.t);
  step.inverse_bias1 = static_cast<float>(1 / (1 - __builtin_pow(s.beta1, t)));
  step.inverse_bias2 = static_cast<float>(1 / (1 - __builtin_pow(s.beta2, t)));
  step.eps = static_cast<float>(s.eps);
  step.gradient_factor = static_cast<float>(s.gradient_factor);
  step.lr = static_cast<float>(s.lr * static_cast<double>(range.lr_factor));
  step.decay = range.weight_decay;
  return step;
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
