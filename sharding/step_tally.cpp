#include "sharding/step_tally.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace shardrun {

StepTally::StepTally(int64_t slots, Memory& memory, Stream& stream)
    : stream_(stream), slots_(slots) {
  losses_ = allocate_tensor(memory, Dtype::fp32, Shape{slots}, "losses");
  valid_ = allocate_tensor(memory, Dtype::int64, Shape{slots}, "valid counts");
  limbs_ = allocate_tensor(memory, Dtype::int64, Shape{ExactSum::kLimbs + 1}, "sum of squares");
  const auto host = [&](const OwnedTensor& tensor) {
    HostBuffer buffer(stream.device(), tensor.tensor.bytes(), "the step's sums");
    std::fill_n(buffer.data(), buffer.bytes(), std::byte{0});
    return buffer;
  };
  losses_on_host_ = host(losses_);
  valid_on_host_ = host(valid_);
  limbs_on_host_ = host(limbs_);
  zeros_ = host(limbs_);
}

void StepTally::begin() {
  used_ = squares_ = 0;
  copy_from_host(limbs_.tensor, zeros_.data(), stream_);
}

void StepTally::add(const Loss& loss) {
  if (!stream_.computes()) return;
  SHARDRUN_CHECK(!full(), "more than {} leaves between two reads", slots_);
  kernels::copy_bytes(losses_.tensor.flat(used_, 1), loss.sum, stream_);
  kernels::copy_bytes(valid_.tensor.flat(used_, 1), loss.valid, stream_);
  ++used_;
}

void StepTally::add_squares(ConstTensor block_squares) {
  kernels::add_exact(limbs_.tensor, block_squares, stream_);
  squares_ += block_squares.numel();
}

void StepTally::fetch() {
  copy_to_host(losses_on_host_.data(), losses_.tensor, stream_);
  copy_to_host(valid_on_host_.data(), valid_.tensor, stream_);
  copy_to_host(limbs_on_host_.data(), limbs_.tensor, stream_);
}

void StepTally::read(StepRecord& record) {
  for (int64_t i = 0; i < used_; ++i) {
    record.loss.add(static_cast<double>(losses_on_host_.as<float>()[i]));
    record.valid += valid_on_host_.as<int64_t>()[i];
  }
  used_ = 0;
  if (squares_ == 0) return;
  record.squares.add({limbs_on_host_.as<int64_t>(), ExactSum::kLimbs + 1}, squares_);
  squares_ = 0;
}

}  // namespace shardrun
