// Layer norm over the last dimension (Ba, Kiros, Hinton 2016). Statistics and parameter gradients are
// fp32. x, y and their gradients are [..., C] in the activations' dtype; weight and bias are [C] in any
// floating dtype; mean and rstd are fp32 [rows].
#pragma once

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

// bias may be absent.
void layer_norm_forward(Tensor y, Tensor mean, Tensor rstd, ConstTensor x, ConstTensor weight,
                        ConstTensor bias, float eps, Stream& stream);

// dweight and dbias (fp32 [C]; dbias absent when the bias is) are overwritten, or added to when
// `accumulate`. Row sums in 32 lanes; columns in blocks of 64 rows, block sums pairwise.
void layer_norm_backward(Tensor dx, Tensor dweight, Tensor dbias, ConstTensor dy, ConstTensor x,
                         ConstTensor weight, ConstTensor mean, ConstTensor rstd,
                         bool accumulate_weight, bool accumulate_bias, Stream& stream);

// out[c] (fp32 [C]) = sum over rows of in[..., c], added to out when `accumulate`.
void column_sum(Tensor out, ConstTensor in, bool accumulate, Stream& stream);

}  // namespace shardrun::kernels
