// The CPU's matrix product; kernels/matmul.cpp has checked the arguments and calls it.
#pragma once

#include "kernels/matmul.h"

namespace shardrun::cpu {

void matmul(Tensor c, ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream);

}  // namespace shardrun::cpu
