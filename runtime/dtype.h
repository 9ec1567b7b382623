// Element types of tensors, on every device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardrun {

enum class Dtype : uint8_t { fp32, bf16, fp16, fp64, int32, int64, uint16, uint8 };

// Storage types of the 16-bit formats; arithmetic happens in fp32 (kernels/math/convert.h).
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

constexpr size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp64:
    case Dtype::int64:
      return 8;
    case Dtype::fp32:
    case Dtype::int32:
      return 4;
    case Dtype::bf16:
    case Dtype::fp16:
    case Dtype::uint16:
      return 2;
    case Dtype::uint8:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(Dtype dtype) {
  constexpr const char* kNames[] = {"fp32",  "bf16",  "fp16",   "fp64",
                                    "int32", "int64", "uint16", "uint8"};
  return kNames[static_cast<int>(dtype)];
}

constexpr bool is_floating(Dtype dtype) { return dtype <= Dtype::fp64; }

template <typename T>
inline constexpr Dtype dtype_of = Dtype::uint8;
template <>
inline constexpr Dtype dtype_of<float> = Dtype::fp32;
template <>
inline constexpr Dtype dtype_of<double> = Dtype::fp64;
template <>
inline constexpr Dtype dtype_of<Bf16> = Dtype::bf16;
template <>
inline constexpr Dtype dtype_of<Fp16> = Dtype::fp16;
template <>
inline constexpr Dtype dtype_of<int32_t> = Dtype::int32;
template <>
inline constexpr Dtype dtype_of<int64_t> = Dtype::int64;
template <>
inline constexpr Dtype dtype_of<uint16_t> = Dtype::uint16;

}  // namespace shardrun
