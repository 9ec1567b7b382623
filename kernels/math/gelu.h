// GELU, tanh form (Hendrycks, Gimpel 2016), written with the logistic function: (1 + tanh u) / 2 is
// 1 / (1 + e^-2u), which keeps relative accuracy in the negative tail.
#pragma once

#include "kernels/math/functions.h"

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

// 2 sqrt(2/pi) and 0.044715 times that.
inline constexpr float kGeluLinear = 1.5957691216057308f;
inline constexpr float kGeluCubic = 0.07135481282712025f;

HD float gelu(float x) {
  // Past 16 the exponential is 0 or infinity, and the cube must not overflow into 0 times infinity.
  const float limited = clamp(x, -16.0f, 16.0f);
  const float e = exp(-limited * (kGeluLinear + kGeluCubic * (limited * limited)));
  return x / (1.0f + e);
}

HD float gelu_derivative(float x) {
  // At 10 the logistic function is 0 or 1 in fp32 and the exponential still finite.
  const float limited = clamp(x, -10.0f, 10.0f);
  const float square = limited * limited;
  const float e = exp(-limited * (kGeluLinear + kGeluCubic * square));
  const float s = 1.0f / (1.0f + e);
  return s + limited * (e * s * s) * (kGeluLinear + 3.0f * kGeluCubic * square);
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
