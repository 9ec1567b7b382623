#include "sharding/batch_feed.h"

#include "kernels/loss.h"

namespace shardrun {

BatchFeed::BatchFeed(int64_t slots, const Shape& shape, int64_t vocabulary, Stream& stream)
    : slots_(slots), shape_(shape), vocabulary_(vocabulary), stream_(stream) {
  if (!stream.device()) return;
  const size_t bytes = static_cast<size_t>(2 * slots * shape.numel()) * sizeof(int32_t);
  buffer_ = HostBuffer(stream.device(), bytes, "tokens and targets");
}

void check_range(const char* what, ConstTensor values, int32_t lowest, int64_t vocabulary) {
  const int32_t* value = values.as<int32_t>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (value[i] >= lowest && value[i] < vocabulary) continue;
    throw DataError("a batch has {} {} at {}, wanted {} to {}", what, value[i], i, lowest,
                    vocabulary - 1);
  }
}

void BatchFeed::fill(Tensor tokens, Tensor targets,
                     FunctionRef<void(Tensor tokens, Tensor targets)> source) {
  if (!stream_.computes()) return;
  if (!stream_.device()) return source(tokens, targets);
  const Tensor host_tokens = next_slot(tokens.shape()), host_targets = next_slot(targets.shape());
  source(host_tokens, host_targets);
  check_range("token", host_tokens, 0, vocabulary_);
  check_range("target", host_targets, kernels::kIgnoreTarget, vocabulary_);
  copy_from_host(tokens, host_tokens.data(), stream_);
  copy_from_host(targets, host_targets.data(), stream_);
}

Tensor BatchFeed::next_slot(const Shape& shape) {
  SHARDRUN_CHECK(shape == shape_, "a batch of {}, wanted {}", shape.text(), shape_.text());
  SHARDRUN_CHECK(used_ < 2 * slots_, "more than {} leaves before the host waits", slots_);
  return {buffer_.as<int32_t>() + used_++ * shape_.numel(), Dtype::int32, shape_};
}

}  // namespace shardrun
