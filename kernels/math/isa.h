// What the functors in this folder share: they run on the CPU, compiled once per instruction set,
// and on CUDA.
//
// [Note: one header, several instruction sets] A function from a header that is compiled with
// different -m flags is, to the linker, one function: it keeps one copy, and a processor without
// AVX-512 may be handed the AVX-512 one. So everything here lives in an inline namespace named
// after the instruction set, and is forced inline.
#pragma once

#include <cstdint>

#ifndef SHARDRUN_ISA
#define SHARDRUN_ISA base
#endif

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD __attribute__((always_inline)) inline
#endif

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

HD uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
HD float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
