// Kernels that the GPU's table names and that are not built yet.
#include "kernels/cuda/table.h"
#include "runtime/error.h"

namespace shardrun::cuda {

void attention_forward(Tensor, Tensor, ConstTensor, const kernels::AttentionOptions&, Stream&) {
  throw DeviceError("attention on a GPU: not built yet");
}
void attention_backward(Tensor, ConstTensor, ConstTensor, ConstTensor, ConstTensor,
                        const kernels::AttentionOptions&, Stream&) {
  throw DeviceError("attention on a GPU: not built yet");
}

}  // namespace shardrun::cuda
