// Matrix products where oneDNN was not found: correct, and slow.
#include "kernels/cpu/onednn.h"
#include "runtime/error.h"

namespace shardrun::cpu {

void gemm_fp32(const GemmShape& s, float* c, const float* a, const float* b, bool accumulate, Isa) {
  const int64_t a_row = s.transpose_a ? 1 : s.lda, a_column = s.transpose_a ? s.lda : 1;
  const int64_t b_row = s.transpose_b ? 1 : s.ldb, b_column = s.transpose_b ? s.ldb : 1;
  for (int64_t i = 0; i < s.m; ++i) {
    float* row = c + i * s.ldc;
    for (int64_t j = 0; j < s.n && !accumulate; ++j) row[j] = 0.0f;
    for (int64_t p = 0; p < s.k; ++p) {
      const float x = a[i * a_row + p * a_column];
      for (int64_t j = 0; j < s.n; ++j) row[j] += x * b[p * b_row + j * b_column];
    }
  }
}

bool has_gemm_bf16(Isa) {
  return false;
}

void gemm_bf16(const GemmShape&, float*, const Bf16*, const Bf16*, bool, Isa) {
  throw DeviceError("bf16 matrix product: this build is without oneDNN");
}

std::string onednn_version() { return "plain-loops"; }

}  // namespace shardrun::cpu
