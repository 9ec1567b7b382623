// Elementwise maths. Floating tensors may be fp32, bf16 or fp16, each argument its own: elements are
// widened to fp32, computed, rounded once to nearest even. Shapes must hold the same number of
// elements. Outputs may be the same memory as an input, never overlap it in part.
#pragma once

#include "runtime/random.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

void fill(Tensor out, float value, Stream& stream);
void copy_bytes(Tensor out, ConstTensor in, Stream& stream);  // same dtype, any dtype
void cast(Tensor out, ConstTensor in, Stream& stream);
void add(Tensor out, ConstTensor a, ConstTensor b, Stream& stream);

// GELU, the tanh form that GPT-2 uses: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
void gelu_forward(Tensor out, ConstTensor x, Stream& stream);
void gelu_backward(Tensor dx, ConstTensor dy, ConstTensor x, Stream& stream);

// Zero with probability p in [0, 1), else x / (1 - p). Element e is kept when its 32-bit draw is
// >= p * 2^32. Backward is the same call on dy with the same key.
void dropout(Tensor out, ConstTensor x, float p, RandomKey key, Stream& stream);

// out[i] = mean + std * z, z standard normal from draw e = first + i by the inverse of the normal distribution
// function (Wichura, Algorithm AS 241, 1988), fp32. The key's `step` and `leaf` are taken as given.
void random_normal(Tensor out, float mean, float std, RandomKey key, int64_t first, Stream& stream);

}  // namespace shardrun::kernels
