// One decision per step, the same on every rank: apply the update, skip it because a gradient is not
// finite, or skip it because nothing was valid. Ranks exchange one record and combine all of them in
// rank order.
#pragma once

#include <cstdint>

#include "comm/communicator.h"
#include "comm/exact_sum.h"

namespace shardrun {

// Where a gradient first was not finite: the smallest (micro-step, unit in backward order, leaf, element).
struct Overflow {
  int64_t micro_step = -1;  // -1: nowhere
  int64_t unit_order = 0;
  int64_t leaf = 0;
  int64_t unit = 0, segment = 0, element = 0;  // element of the segment
  int64_t nan = 0;                             // else infinity

  bool found() const { return micro_step >= 0; }
  bool before(const Overflow& other) const;
};

// What a rank brings.
struct StepRecord {
  Overflow overflow;
  ExactSum squares;  // of its slices of the gradient sum, scaled as backward left it
  ExactSum loss;     // sums over valid items of its leaves
  int64_t valid = 0;
  int64_t stop = 0;  // a signal or a deadline asks to stop after this step
  int64_t writer_quiet = 0;  // this rank's background save can go no further alone
};

enum class Outcome : uint8_t { apply, overflow, empty };

struct Decision {
  Outcome outcome = Outcome::empty;
  double loss = 0;             // mean over valid items; NaN if a leaf's loss was not finite
  double norm = 0;             // of the unscaled mean gradient, before clipping
  double gradient_factor = 0;  // leaf_nominal / (valid x loss scale) x clip
  int64_t valid = 0;
  bool stop = false;
  bool writers_quiet = false;  // on every rank
  Overflow overflow;

  bool apply() const { return outcome == Outcome::apply; }
};

// leaf_nominal: micro-batch x sequence length. grad_clip 0: none. All ranks call.
//
// [Note: clip] clip = min(1, grad_clip / (norm + 1e-6)), PyTorch's clip_grad_norm_.
Decision decide(const StepRecord& mine, double loss_scale, double leaf_nominal, double grad_clip,
                Communicator& comm);

}  // namespace shardrun
