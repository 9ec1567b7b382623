// AdamW (Loshchilov, Hutter 2019) over a slice, one pass over memory: unscale and clip the gradient,
// move the moments, decay and update the master, write the compute copy.
//
//   g = gradient * gradient_factor
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / bias1 / (sqrt(v / bias2) + eps) + decay p),  bias_k = 1 - beta_k^t
#pragma once

#include <span>

#include "kernels/adamw_scalars.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

// master fp32 [n], or absent: then `compute` (bf16) is the parameter, widened, updated, and rounded
// stochastically: the low 16 bits of the fp32 result are rounded up with probability their value over
// 2^16, by the low 16 bits of the draw. moment1, moment2, gradient fp32 [n]. compute: bf16 or fp16 [n],
// rounded to nearest even, or absent (fp32 training: the master is what computes).
void adamw(Tensor master, Tensor compute, Tensor moment1, Tensor moment2, ConstTensor gradient,
           const AdamwScalars& scalars, std::span<const AdamwRange> ranges, Stream& stream);

}  // namespace shardrun::kernels
