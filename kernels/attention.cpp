// The public attention: checks, counts, and hands over to the device. Called by the ops.
#include "kernels/attention.h"

#include "kernels/arguments.h"
#include "kernels/cpu/attention.h"

namespace shardrun::kernels {
namespace {

void check(ConstTensor qkv, ConstTensor out, ConstTensor lse, const AttentionOptions& options) {
  SHARDRUN_CHECK(
      qkv.dtype() == Dtype::fp32 || qkv.dtype() == Dtype::bf16 || qkv.dtype() == Dtype::fp16,
      "attention: qkv is {}", name_of(qkv.dtype()));
  const Shape& shape = qkv.shape();
  SHARDRUN_CHECK(shape.rank() == 3 && options.heads >= 1 && shape[2] % (3 * options.heads) == 0,
                 "attention: qkv is {}, wanted [B, T, 3 x {} heads x D]", shape.text(),
                 options.heads);
  const Shape wanted = {shape[0], shape[1], shape[2] / 3};
  SHARDRUN_CHECK(out.dtype() == qkv.dtype() && out.shape() == wanted,
                 "attention: output is {} {}, wanted {} {}", name_of(out.dtype()),
                 out.shape().text(), name_of(qkv.dtype()), wanted.text());
  const Shape rows = {shape[0], options.heads, shape[1]};
  SHARDRUN_CHECK(lse.dtype() == Dtype::fp32 && lse.shape() == rows,
                 "attention: lse is {} {}, wanted fp32 {}", name_of(lse.dtype()),
                 lse.shape().text(), rows.text());
  SHARDRUN_CHECK(options.dropout >= 0 && options.dropout < 1,
                 "attention: dropout is {}, wanted [0, 1)", options.dropout);
}

// Operations of one T x T x D product per head; a causal mask halves it.
double product_flops(ConstTensor qkv, const AttentionOptions& options) {
  const double t = static_cast<double>(qkv.shape()[1]);
  const double keys = options.causal ? (t + 1) / 2 : t;
  return 2.0 * static_cast<double>(qkv.shape()[0]) * t * keys *
         static_cast<double>(qkv.shape()[2] / 3);
}

}  // namespace

void attention_forward(Tensor out, Tensor lse, ConstTensor qkv, const AttentionOptions& options,
                       Stream& stream) {
  check(qkv, out, lse, options);
  stream.count(2 * product_flops(qkv, options),
               static_cast<double>(qkv.bytes() + out.bytes() + lse.bytes()));
  if (!stream.computes() || out.numel() == 0) return;
  if (on_gpu(stream)) return cuda::table().attention_forward(out, lse, qkv, options, stream);
  cpu::attention_forward(out, lse, qkv, options, stream);
}

void attention_backward(Tensor dqkv, ConstTensor dout, ConstTensor out, ConstTensor qkv,
                        ConstTensor lse, const AttentionOptions& options, Stream& stream) {
  check(qkv, out, lse, options);
  check(dqkv, dout, lse, options);
  SHARDRUN_CHECK(dqkv.dtype() == qkv.dtype() && dqkv.shape() == qkv.shape(),
                 "attention: dqkv is {} {}, qkv {} {}", name_of(dqkv.dtype()), dqkv.shape().text(),
                 name_of(qkv.dtype()), qkv.shape().text());
  stream.count(5 * product_flops(qkv, options),
               static_cast<double>(2 * qkv.bytes() + 2 * out.bytes() + lse.bytes()));
  if (!stream.computes() || out.numel() == 0) return;
  if (on_gpu(stream)) {
    return cuda::table().attention_backward(dqkv, dout, out, qkv, lse, options, stream);
  }
  cpu::attention_backward(dqkv, dout, out, qkv, lse, options, stream);
}

}  // namespace shardrun::kernels
