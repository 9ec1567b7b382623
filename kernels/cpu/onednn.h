// Matrix products of one thread on strided row-major views. The tiles of kernels/cpu/matmul.cpp and
// kernels/cpu/attention.cpp come here. Implemented by onednn.cpp, the one file that knows oneDNN, or,
// where that library is absent, by no_onednn.cpp with plain loops.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/dtype.h"
#include "runtime/stream.h"

namespace shardrun::cpu {

// c[m, n] = op(a) op(b), all sizes >= 1. Leading dimensions are those of the stored matrices, in
// elements: op(a) is [m, k], stored [k, m] when transposed, likewise b.
struct GemmShape {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  int64_t lda = 0, ldb = 0, ldc = 0;
  bool operator==(const GemmShape&) const = default;
};

// Adds to c when `accumulate`.
void gemm_fp32(const GemmShape& shape, float* c, const float* a, const float* b, bool accumulate,
               Isa isa);

// Whether gemm_bf16 exists at this level; without it callers widen to fp32.
bool has_gemm_bf16(Isa isa);

// Products of bf16 summed in fp32. Fastest when all three matrices are dense: oneDNN 2.6 drops to half
// its speed on views with wider leading dimensions.
void gemm_bf16(const GemmShape& shape, float* c, const Bf16* a, const Bf16* b, bool accumulate,
               Isa isa);

// "oneDNN-2.6.3"; "plain-loops" in a build without it.
std::string onednn_version();

}  // namespace shardrun::cpu
