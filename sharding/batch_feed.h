// A leaf's tokens and targets on their way from the host to the device. Used by TrainStep. On the CPU
// the source writes where the model reads. To a GPU they go through pinned memory, one slot for
// each leaf until the host next waits for the device, so that nobody waits for an upload; and here
// their range is looked at, which kernels on a GPU leave alone.
#pragma once

#include "runtime/device.h"
#include "runtime/memory.h"

namespace shardrun {

// DataError unless all values (int32, on the host) are in [lowest, vocabulary).
void check_range(const char* what, ConstTensor values, int32_t lowest, int64_t vocabulary);

class BatchFeed {
 public:
  // Leaves of `shape` whose tokens lie below `vocabulary`.
  BatchFeed(int64_t slots, const Shape& shape, int64_t vocabulary, Stream& stream);

  // Has `source` fill tokens and targets (int32, on the host) and gives them to the device tensors. Not
  // on an idle stream. DataError for what is out of range, on a GPU.
  void fill(Tensor tokens, Tensor targets, FunctionRef<void(Tensor tokens, Tensor targets)> source);
  // The host has waited for the device: all slots are free again.
  void rewind() { used_ = 0; }

 private:
  Tensor next_slot(const Shape& shape);

  int64_t slots_;
  Shape shape_;
  int64_t vocabulary_;
  Stream& stream_;
  int64_t used_ = 0;   // halves of slots: tokens and targets
  HostBuffer buffer_;  // empty on the CPU
};

}  // namespace shardrun
