// Checks, counts, and goes to the table of the device.
#include "kernels/loss.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

namespace {

void check_shapes(ConstTensor logits, ConstTensor lse, ConstTensor targets, int64_t vocabulary) {
  check_floating(logits, "logits");
  check_dtype(lse, Dtype::fp32, "lse");
  check_dtype(targets, Dtype::int32, "targets");
  check_numel(lse, logits.shape().rows(), "lse");
  check_numel(targets, logits.shape().rows(), "targets");
  SHARDRUN_CHECK(vocabulary >= 1 && vocabulary <= logits.shape().columns(),
                 "vocabulary: got {}, wanted 1 .. {}", vocabulary, logits.shape().columns());
}

// On a GPU whoever uploads the targets has looked at them.
void check_targets(ConstTensor targets, int64_t vocabulary, const Stream& stream) {
  if (on_gpu(stream)) return;
  const int32_t* target = targets.as<int32_t>();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    SHARDRUN_CHECK(target[i] == kIgnoreTarget || (target[i] >= 0 && target[i] < vocabulary),
                   "targets: got {} at {}, wanted {} or 0 .. {}", target[i], i, kIgnoreTarget,
                   vocabulary - 1);
  }
}

}  // namespace

void cross_entropy_forward(Tensor loss_sum, Tensor valid, Tensor lse, ConstTensor logits,
                           ConstTensor targets, int64_t vocabulary, Stream& stream) {
  check_shapes(logits, lse, targets, vocabulary);
  check_dtype(loss_sum, Dtype::fp32, "loss_sum");
  check_dtype(valid, Dtype::int64, "valid");
  check_numel(loss_sum, 1, "loss_sum");
  check_numel(valid, 1, "valid");
  stream.count(22 * static_cast<double>(logits.numel()), bytes_of({lse, logits, targets}));
  if (!stream.computes()) return;
  check_targets(targets, vocabulary, stream);
  if (on_gpu(stream)) {
    return cuda::table().cross_entropy_forward(loss_sum.as<float>(), valid.as<int64_t>(),
                                               lse.as<float>(), in(logits), targets.as<int32_t>(),
                                               vocabulary, logits.shape().rows(),
                                               logits.shape().columns(), queue(stream));
  }
  cpu::table_for(stream).cross_entropy_forward(
      loss_sum.as<float>(), valid.as<int64_t>(), lse.as<float>(), in(logits), targets.as<int32_t>(),
      vocabulary, logits.shape().rows(), logits.shape().columns(), stream.pool());
}

void cross_entropy_backward(Tensor dlogits, ConstTensor logits, ConstTensor lse,
                            ConstTensor targets, int64_t vocabulary, float scale, Stream& stream) {
  check_shapes(logits, lse, targets, vocabulary);
  check_floating(dlogits, "dlogits");
  check_numel(dlogits, logits.numel(), "dlogits");
  stream.count(22 * static_cast<double>(logits.numel()), bytes_of({dlogits, lse, logits, targets}));
  if (!stream.computes()) return;
  check_targets(targets, vocabulary, stream);
  if (on_gpu(stream)) {
    return cuda::table().cross_entropy_backward(
        out(dlogits), in(logits), lse.as<float>(), targets.as<int32_t>(), vocabulary, scale,
        logits.shape().rows(), logits.shape().columns(), queue(stream));
  }
  cpu::table_for(stream).cross_entropy_backward(
      out(dlogits), in(logits), lse.as<float>(), targets.as<int32_t>(), vocabulary, scale,
      logits.shape().rows(), logits.shape().columns(), stream.pool());
}

}  // namespace shardrun::kernels
