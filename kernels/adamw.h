// AdamW (Loshchilov, Hutter 2019) over a slice, one pass over memory: unscale and clip the gradient,
// move the moments, decay and update the master, write the compute copy.
//
//   g = gradient * gradient_factor
//   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
//   p = p - lr (m / bias1 / (sqrt(v / bias2) + eps) + decay p),  bias_k = 1 - beta_k^t
#pragma once

#include <span>

#include "runtime/random.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

struct AdamwScalars {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  int64_t t = 1;               // number of this update, from 1
  double gradient_factor = 1;  // leaf_nominal / (valid x loss scale) x clip; applied as float
};

// Elements [begin, end) of the slice have their own factors. Ranges are sorted, do not overlap, and
// elements in none of them (padding) keep the value zero.
struct AdamwRange {
  int64_t begin = 0, end = 0;
  float lr_factor = 1;
  float weight_decay = 0;
  RandomKey key;            // stochastic rounding: key of the parameter
  int64_t model_begin = 0;  // index in the parameter of element `begin`: the counter of the draw
};

// master fp32 [n], or absent: then `compute` (bf16) is the parameter, widened, updated, and rounded
// stochastically: the low 16 bits of the fp32 result are rounded up with probability their value over
// 2^16, by the low 16 bits of the draw. moment1, moment2, gradient fp32 [n]. compute: bf16 or fp16 [n],
// rounded to nearest even, or absent (fp32 training: the master is what computes).
void adamw(Tensor master, Tensor compute, Tensor moment1, Tensor moment2, ConstTensor gradient,
           const AdamwScalars& scalars, std::span<const AdamwRange> ranges, Stream& stream);

}  // namespace shardrun::kernels
