// Conversions between fp32 and the 16-bit formats: to nearest even, NaN stays NaN (made quiet),
// infinities stay. fp32 denormals are zero on both sides, and with them those of bf16, which has
// the same exponents; fp16 denormals are kept. Branch-free, and without fp32 denormals in between:
// the results do not depend on the flush modes of the thread.
#pragma once

#include "kernels/math/isa.h"
#include "runtime/dtype.h"

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

// fp32 denormals become zero of the same sign; all else stays.
HD uint32_t flush_bits(uint32_t bits) {
  return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
}
HD float flush(float x) {
  return float_of(flush_bits(bits_of(x)));
}

HD float widen(float x) {
  return x;
}

HD float widen(Bf16 x) {
  return float_of(flush_bits(static_cast<uint32_t>(x.bits) << 16));
}

HD float widen(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 1u << 22 : 0u);
  const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x0400u ? denormal : normal;
  return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}

HD void narrow(float x, float& out) {
  out = x;
}

HD void narrow(float x, Bf16& out) {
  const uint32_t bits = flush_bits(bits_of(x));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

HD void narrow(float x, Fp16& out) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t rounded = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t normal = magnitude >= 0x47800000u ? 0x7c00u : rounded;
  // Below 2^-14 the spacing is 2^-24, that of fp32 in [1/2, 1): an addition rounds.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  const uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  out.bits = static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : finite));
}

// Rounds the magnitude up with probability (the 16 bits cut off) / 2^16, by the low 16 bits of
// `draw`.
HD Bf16 narrow_stochastic(float x, uint32_t draw) {
  const uint32_t bits = flush_bits(bits_of(x));
  const uint32_t quiet = (bits >> 16) | 0x40u;
  const uint32_t rounded = (bits + (draw & 0xffffu)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
