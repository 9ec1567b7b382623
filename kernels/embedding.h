// Token and position embedding. tokens are int32 [B, T], each in [0, rows of the table).
#pragma once

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

// y[b, t, :] = table[tokens[b, t], :] + positions[t, :], added in fp32, rounded once.
// table [Vp, C], positions [>= T, C] or absent, y [B, T, C].
void embedding_forward(Tensor y, ConstTensor tokens, ConstTensor table, ConstTensor positions,
                       Stream& stream);

// dtable fp32 [Vp, C]: row v is the sum of dy over the places where tokens is v, in order of place;
// no atomics. All other rows become zero, or the sums are added when `accumulate`.
void embedding_backward(Tensor dtable, ConstTensor tokens, ConstTensor dy, bool accumulate,
                        Stream& stream);

// dpositions fp32 [>= T, C]: sum over b of dy[b, t, :], in order of b; rows past T become zero, or
// are left alone when `accumulate`.
void position_backward(Tensor dpositions, ConstTensor dy, bool accumulate, Stream& stream);

}  // namespace shardrun::kernels
