// The end of a matrix product where cuBLASLt has none that fits. Called by matmul.cpp.
#pragma once

#include "kernels/cuda/kernels.h"

namespace shardrun::cuda {

// out[rows, columns] = x + bias[columns], rounded once; x and bias may be absent and are then zero;
// out may be the memory of x.
void add_bias(Out out, In x, In bias, int64_t rows, int64_t columns, StreamHandle stream);

}  // namespace shardrun::cuda
