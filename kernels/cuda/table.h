// The GPU's functions as a table, so that a build without CUDA needs one file that throws
// (kernels/no_cuda.cpp) and not one for each kernel. Filled by table.cpp.
#pragma once

#include "kernels/attention.h"
#include "kernels/cuda/kernels.h"
#include "kernels/matmul.h"

namespace shardrun::cuda {

// cuBLASLt with fp32 accumulation; kernels/matmul.cpp has checked the arguments.
void matmul(Tensor c, ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream);
std::string matmul_library();  // "cuBLASLt-13.0.0"

// kernels/attention.cpp has checked the arguments.
void attention_forward(Tensor out, Tensor lse, ConstTensor qkv,
                       const kernels::AttentionOptions& options, Stream& stream);
void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const kernels::AttentionOptions& options, Stream& stream);

struct Table {
  decltype(&cuda::fill) fill;
  decltype(&cuda::copy_bytes) copy_bytes;
  decltype(&cuda::cast) cast;
  decltype(&cuda::add) add;
  decltype(&cuda::gelu_forward) gelu_forward;
  decltype(&cuda::gelu_backward) gelu_backward;
  decltype(&cuda::dropout) dropout;
  decltype(&cuda::random_normal) random_normal;
  decltype(&cuda::layer_norm_forward) layer_norm_forward;
  decltype(&cuda::layer_norm_backward_workspace) layer_norm_backward_workspace;
  decltype(&cuda::layer_norm_backward) layer_norm_backward;
  decltype(&cuda::column_sum_workspace) column_sum_workspace;
  decltype(&cuda::column_sum) column_sum;
  decltype(&cuda::embedding_forward) embedding_forward;
  decltype(&cuda::embedding_backward_workspace) embedding_backward_workspace;
  decltype(&cuda::embedding_backward) embedding_backward;
  decltype(&cuda::position_backward) position_backward;
  decltype(&cuda::cross_entropy_forward) cross_entropy_forward;
  decltype(&cuda::cross_entropy_backward) cross_entropy_backward;
  decltype(&cuda::fold) fold;
  decltype(&cuda::block_squares) block_squares;
  decltype(&cuda::add_exact) add_exact;
  decltype(&cuda::adamw) adamw;
  decltype(&cuda::matmul) matmul;
  decltype(&cuda::matmul_library) matmul_library;
  decltype(&cuda::attention_forward) attention_forward;
  decltype(&cuda::attention_backward) attention_backward;
};

const Table& table();

}  // namespace shardrun::cuda
