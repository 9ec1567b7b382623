// Softmax cross entropy over the last dimension. logits [N, Vp] in any floating dtype; only the first
// `vocabulary` columns exist, the rest is padding that has no part in sums and gets gradient zero.
// targets int32 [N]; kIgnoreTarget marks places that do not count.
#pragma once

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

inline constexpr int32_t kIgnoreTarget = -1;

// loss_sum fp32 [1]: sum over valid rows of lse - logit[target], row losses added in 32 lanes inside
// chunks of 1024 rows, chunks left to right. valid int64 [1]: number of valid rows. lse fp32 [N]: log
// of the sum of exponentials.
void cross_entropy_forward(Tensor loss_sum, Tensor valid, Tensor lse, ConstTensor logits,
                           ConstTensor targets, int64_t vocabulary, Stream& stream);

// dlogits = scale * (softmax(logits) - onehot(target)) on valid rows, zero elsewhere. `scale` is the
// fp32 seed of backward (loss scale / leaf_nominal); products are fp32, rounded once.
void cross_entropy_backward(Tensor dlogits, ConstTensor logits, ConstTensor lse,
                            ConstTensor targets, int64_t vocabulary, float scale, Stream& stream);

}  // namespace shardrun::kernels
