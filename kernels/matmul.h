// Matrix product with fp32 accumulation.
#pragma once

#include <string>

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

enum class Transpose : bool { no, yes };

// c[M, N] = op(a) op(b) (+ bias[N]) (+ c when `accumulate`), row-major. a and b have one dtype; c has
// that dtype or fp32; bias has any floating dtype, absent if none; accumulate needs c fp32. Tensors of
// more than two dimensions are read as [rows, columns]. Rounded once, from fp32. Shapes are cut into
// tiles by shape alone, each tile by one thread: the number of threads does not change bits.
void matmul(Tensor c, ConstTensor a, Transpose transpose_a, ConstTensor b, Transpose transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream);

// Which library multiplies there, "oneDNN-2.6.3": a part of what decides bits.
std::string matmul_library(DeviceKind kind = DeviceKind::cpu);

}  // namespace shardrun::kernels
