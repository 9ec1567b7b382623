// What a step adds up besides gradients: the losses and valid items of its leaves, the squares for the
// norm. Used by TrainStep. All of it stays on the device until the step decides; then it travels to
// the host in one go, so that no micro-step waits for the device.
#pragma once

#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/unit.h"
#include "sharding/decision.h"

namespace shardrun {

class StepTally {
 public:
  // For `slots` leaves between two reads.
  StepTally(int64_t slots, Memory& memory, Stream& stream);

  void begin();                // of a step or an evaluation
  void add(const Loss& loss);  // of one leaf; of none on an idle stream
  void add_squares(ConstTensor block_squares);
  bool full() const { return used_ == slots_; }

  // Sends all of it to the host; after the stream was synchronized read() adds it to the record. More
  // leaves may then follow.
  void fetch();
  void read(StepRecord& record);

 private:
  Stream& stream_;
  int64_t slots_;
  int64_t used_ = 0;     // leaves since begin() or read()
  int64_t squares_ = 0;  // since begin()
  OwnedTensor losses_;   // fp32 [slots]
  OwnedTensor valid_;    // int64 [slots]
  OwnedTensor limbs_;    // int64: the exact sum of squares
  HostBuffer losses_on_host_, valid_on_host_, limbs_on_host_, zeros_;
};

}  // namespace shardrun
