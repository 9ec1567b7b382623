// Elementary functions in fp32, our own so that every processor gives the same bits: branch-free,
// no fused multiply-add (baseline x86 has none), no tables. Bounds are against the exact value, in
// units in the last place, and are held by tests; results below the normal range are zero.
#pragma once

#include "kernels/math/isa.h"

#ifdef __CUDACC__
#include <cmath>
#endif

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

// A NaN passes through.
HD float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

HD float sqrt(float x) {
#ifdef __CUDACC__
  return ::sqrtf(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// e^x, within 2 ulp. Reduced by Cody and Waite; polynomial of Moshier's Cephes library (expf).
HD float exp(float x) {
  const float limited = clamp(x, -150.0f, 130.0f);
  // Adding 1.5 x 2^23 leaves the nearest integer in the low bits: no rounding instruction needed.
  const float shifted = limited * 1.44269504088896341f + 12582912.0f;
  const int32_t n = static_cast<int32_t>(bits_of(shifted) - 0x4b400000u);
  const float n_float = shifted - 12582912.0f;
  const float r = (limited - n_float * 0.693359375f) - n_float * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^128 is no fp32 number, so the power goes in two halves.
  const int32_t half = n >> 1;
  const float scale_a = float_of(static_cast<uint32_t>(half + 127) << 23);
  const float scale_b = float_of(static_cast<uint32_t>(n - half + 127) << 23);
  return x < -87.33654f ? 0.0f : p * scale_a * scale_b;
}

// Natural logarithm, within 1 ulp. Series of FreeBSD's e_logf.c (Sun Microsystems 1993). log(0) is
// -infinity, of negative numbers NaN; denormals are zero.
HD float log(float x) {
  const uint32_t bits = bits_of(x) + (0x3f800000u - 0x3f3504f3u);
  const float k = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  const float f = float_of((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  const float w = z * z;
  const float t1 = w * (0.40000972152f + w * 0.24279078841f);
  const float t2 = z * (0.66666662693f + w * 0.28498786688f);
  const float half_square = 0.5f * f * f;
  const float value =
      s * (half_square + (t1 + t2)) + k * 9.0580006145e-6f - half_square + f + k * 6.9313812256e-1f;
  const float infinity = float_of(0x7f800000u);
  float result = x < infinity ? value : x;  // infinity and NaN
  result = x < 0x1p-126f ? float_of(0xff800000u) : result;
  return x <= -0x1p-126f ? float_of(0x7fc00000u) : result;
}

// Hyperbolic tangent, within 3 ulp: polynomial of Cephes (tanhf) below 0.625, else by exp.
HD float tanh(float x) {
  const float magnitude = float_of(bits_of(x) & 0x7fffffffu);
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const float small = p * z * x + x;
  const float large = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  const float signed_large = float_of(bits_of(large) | (bits_of(x) & 0x80000000u));
  return magnitude < 0.625f ? small : signed_large;
}

// Standard normal number from 32 random bits, by the inverse of the distribution function: PPND7 of
// Wichura, "Algorithm AS 241", Applied Statistics 37 (1988). The argument is (draw + 1/2) / 2^32;
// both tails are formed from the small side, so neither loses bits. The outermost branch of AS 241
// (sqrt(-log) > 5) lies beyond 32 bits. Absolute error below 2e-6 within the 6.4 sigma that exist.
HD float normal_from_draw(uint32_t draw) {
  const bool lower = draw < 0x80000000u;
  const uint32_t side = lower ? draw : ~draw;  // < 2^31
  const float tail = (static_cast<float>(static_cast<int32_t>(side)) + 0.5f) * 0x1p-32f;
  const float q = 0.5f - tail;  // distance from the middle

  const float r = 0.180625f - q * q;
  const float middle =
      q * (((5.9109374720e+1f * r + 1.5929113202e+2f) * r + 5.0434271938e+1f) * r + 3.3871327179f) /
      (((6.7187563600e+1f * r + 7.8757757664e+1f) * r + 1.7895169469e+1f) * r + 1.0f);

  const float s = sqrt(-log(tail)) - 1.6f;
  const float outer =
      (((1.7023821103e-1f * s + 1.3067284816f) * s + 2.7568153900f) * s + 1.4234372777f) /
      ((1.2021132975e-1f * s + 7.3700164250e-1f) * s + 1.0f);

  const float value = q <= 0.425f ? middle : outer;
  return lower ? -value : value;
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
