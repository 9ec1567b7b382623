// A double as integers, for sums that know no order: CPU and CUDA add the parts into limbs of int64.
// comm/exact_sum.h has the limbs' meaning and rounds them at the end.
#pragma once

#include "kernels/math/isa.h"

namespace shardrun::math {

// Limb i counts 2^(32 i - 1074): the whole range of doubles, and room for sums of 2^30 of them. Behind
// the limbs stands how many inputs were not finite.
inline constexpr int kExactLimbs = 67;

struct ExactParts {
  int first;        // limb of part[0]
  int64_t part[3];  // below 2^32 each, of the value's sign; 0 where it is not finite
  bool finite;
};

inline namespace SHARDRUN_ISA {

HD ExactParts exact_parts(double value) {
  constexpr uint64_t kLow32 = 0xffffffffull;
  constexpr uint64_t kFraction = (uint64_t{1} << 52) - 1;
  const uint64_t bits = __builtin_bit_cast(uint64_t, value);
  const int exponent = static_cast<int>(bits >> 52) & 0x7ff;
  if (exponent == 0x7ff) return {0, {0, 0, 0}, false};
  const uint64_t mantissa = (bits & kFraction) | (exponent ? kFraction + 1 : 0);
  const int shift = exponent ? exponent - 1 : 0;  // value = mantissa * 2^(shift - 1074)
  const uint64_t low = (mantissa & kLow32) << (shift % 32);
  const uint64_t high = (mantissa >> 32) << (shift % 32);
  const int64_t sign = bits >> 63 ? -1 : 1;
  return {shift / 32,
          {sign * static_cast<int64_t>(low & kLow32),
           sign * static_cast<int64_t>((low >> 32) | (high & kLow32)),  // no bit in common
           sign * static_cast<int64_t>(high >> 32)},
          true};
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
