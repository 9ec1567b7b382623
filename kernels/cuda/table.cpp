#include "kernels/cuda/table.h"

namespace shardrun::cuda {

const Table& table() {
  static constexpr Table kTable{
      .fill = cuda::fill,
      .copy_bytes = cuda::copy_bytes,
      .cast = cuda::cast,
      .add = cuda::add,
      .gelu_forward = cuda::gelu_forward,
      .gelu_backward = cuda::gelu_backward,
      .dropout = cuda::dropout,
      .random_normal = cuda::random_normal,
      .layer_norm_forward = cuda::layer_norm_forward,
      .layer_norm_backward_workspace = cuda::layer_norm_backward_workspace,
      .layer_norm_backward = cuda::layer_norm_backward,
      .column_sum_workspace = cuda::column_sum_workspace,
      .column_sum = cuda::column_sum,
      .embedding_forward = cuda::embedding_forward,
      .embedding_backward_workspace = cuda::embedding_backward_workspace,
      .embedding_backward = cuda::embedding_backward,
      .position_backward = cuda::position_backward,
      .cross_entropy_forward = cuda::cross_entropy_forward,
      .cross_entropy_backward = cuda::cross_entropy_backward,
      .fold = cuda::fold,
      .block_squares = cuda::block_squares,
      .add_exact = cuda::add_exact,
      .adamw = cuda::adamw,
      .matmul = cuda::matmul,
      .matmul_library = cuda::matmul_library,
      .attention_forward = cuda::attention_forward,
      .attention_backward = cuda::attention_backward,
  };
  return kTable;
}

}  // namespace shardrun::cuda
