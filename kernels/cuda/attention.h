// Flash attention: scores are formed tile by tile and never stored (Dao, "FlashAttention-2", 2023).
// attention.cpp makes an AttentionProblem of tensors and calls these; what they compute is in
// kernels/attention.h. 16-bit products run on tensor cores with fp32 sums, probabilities and their
// gradients rounded to 16 bits in between as on the CPU; fp32 stays fp32. Every sum is one warp's, in
// one order: the bits depend on nothing but the arguments. Head sizes up to 128.
#pragma once

#include "kernels/cuda/kernels.h"

namespace shardrun::cuda {

inline constexpr int64_t kMostHeadSize = 128;

struct AttentionProblem {
  Dtype dtype;
  int batch, time, heads, size;  // size: of a head
  bool causal;
  float scale;  // of the scores
  // The probability (b, h, i, j) is kept when the draw of element ((b H + h) T + i) T + j is at
  // least the threshold, and then multiplied by keep_scale; 0: all are kept as they are.
  RandomKey key;
  uint32_t threshold;
  float keep_scale;
};

void flash_forward(void* out, float* lse, const void* qkv, const AttentionProblem& problem,
                   StreamHandle stream);

size_t flash_backward_workspace(const AttentionProblem& problem);
void flash_backward(void* dqkv, const void* dout, const void* out, const void* qkv,
                    const float* lse, const AttentionProblem& problem, void* workspace,
                    StreamHandle stream);

}  // namespace shardrun::cuda
