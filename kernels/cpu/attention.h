// The CPU's attention; kernels/attention.cpp has checked the arguments and calls it.
#pragma once

#include "kernels/attention.h"

namespace shardrun::cpu {

void attention_forward(Tensor out, Tensor lse, ConstTensor qkv,
                       const kernels::AttentionOptions& options, Stream& stream);

void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const kernels::AttentionOptions& options, Stream& stream);

}  // namespace shardrun::cpu
