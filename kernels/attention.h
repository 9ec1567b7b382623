// Multi-head causal self-attention, softmax(q k^T / sqrt(D)) v with optional dropout on the
// probabilities (Vaswani et al. 2017). qkv [B, T, 3C] holds q, k, v one after another along the last
// dimension, C = heads x D, head h in columns [h D, (h+1) D). All but lse in the activations' dtype; scores, softmax and sums
// are fp32. Backward recomputes the probabilities: nothing of size T x T outlives a call (scratch is
// per thread).
#pragma once

#include "runtime/random.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

struct AttentionOptions {
  int64_t heads = 1;
  bool causal = true;
  float dropout = 0;  // in [0, 1); the draw of probability (b, h, i, j) is element ((b H + h) T + i) T + j
  RandomKey key;
};

// out [B, T, C]; lse fp32 [B, H, T].
void attention_forward(Tensor out, Tensor lse, ConstTensor qkv, const AttentionOptions& options,
                       Stream& stream);

// dqkv [B, T, 3C].
void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const AttentionOptions& options, Stream& stream);

}  // namespace shardrun::kernels
