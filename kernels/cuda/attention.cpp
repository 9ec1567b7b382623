// The GPU's attention as the table has it: tensors become an AttentionProblem.
#include "kernels/cuda/attention.h"

#include <cmath>

#include "kernels/arguments.h"
#include "kernels/cuda/table.h"

namespace shardrun::cuda {
namespace {

AttentionProblem problem_of(ConstTensor qkv, const kernels::AttentionOptions& options) {
  const Shape& shape = qkv.shape();
  const int64_t size = shape[2] / (3 * options.heads);
  if (size > kMostHeadSize) {
    throw DeviceError("attention: heads of {} elements, a GPU's kernel takes up to {}", size,
                      kMostHeadSize);
  }
  constexpr int64_t kMost = int64_t{1} << 30;  // so that sums with a tile's edge are ints, too
  SHARDRUN_CHECK(shape[0] <= kMost && shape[1] <= kMost && options.heads <= kMost,
                 "attention: qkv {} with {} heads", shape.text(), options.heads);
  AttentionProblem p{};
  p.dtype = qkv.dtype();
  p.batch = static_cast<int>(shape[0]);
  p.time = static_cast<int>(shape[1]);
  p.heads = static_cast<int>(options.heads);
  p.size = static_cast<int>(size);
  p.causal = options.causal;
  p.scale = 1.0f / std::sqrt(static_cast<float>(size));
  p.key = options.key;
  const double dropout = options.dropout;
  p.threshold = static_cast<uint32_t>(dropout * 0x1p32);
  p.keep_scale = static_cast<float>(1 / (1 - dropout));
  return p;
}

}  // namespace

void attention_forward(Tensor out, Tensor lse, ConstTensor qkv,
                       const kernels::AttentionOptions& options, Stream& stream) {
  flash_forward(out.data(), lse.as<float>(), qkv.data(), problem_of(qkv, options),
                kernels::queue(stream));
}

void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const kernels::AttentionOptions& options, Stream& stream) {
  const AttentionProblem p = problem_of(qkv, options);
  flash_backward(dqkv.data(), dout.data(), out.data(), qkv.data(), lse.as<float>(), p,
                 stream.workspace(flash_backward_workspace(p)), kernels::queue(stream));
}

}  // namespace shardrun::cuda
