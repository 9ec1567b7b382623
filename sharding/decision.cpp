#include "sharding/decision.h"

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace shardrun {

bool Overflow::before(const Overflow& other) const {
  if (!found() || !other.found()) return found();
  return std::tie(micro_step, unit_order, leaf, segment, element) <
         std::tie(other.micro_step, other.unit_order, other.leaf, other.segment, other.element);
}

static StepRecord combine(const StepRecord& mine, Communicator& comm) {
  // Reused from step to step: a step after the second allocates nothing.
  thread_local std::vector<StepRecord> all;
  all.resize(comm.size());
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)),
                        std::as_bytes(std::span(&mine, 1)));
  StepRecord sum;
  sum.writer_quiet = 1;
  for (const StepRecord& record : all) {
    if (record.overflow.before(sum.overflow)) sum.overflow = record.overflow;
    sum.squares.add(record.squares);
    sum.loss.add(record.loss);
    sum.valid += record.valid;
    sum.stop |= record.stop;
    sum.writer_quiet &= record.writer_quiet;
  }
  return sum;
}

Decision decide(const StepRecord& mine, double loss_scale, double leaf_nominal, double grad_clip,
                Communicator& comm) {
  const StepRecord sum = combine(mine, comm);
  Decision decision;
  decision.valid = sum.valid;
  decision.stop = sum.stop != 0;
  decision.writers_quiet = sum.writer_quiet != 0;
  decision.overflow = sum.overflow;
  if (sum.valid > 0) {
    const double mean = leaf_nominal / (static_cast<double>(sum.valid) * loss_scale);
    decision.loss = sum.loss.non_finite() ? std::numeric_limits<double>::quiet_NaN()
                                          : sum.loss.value() / static_cast<double>(sum.valid);
    decision.norm = std::sqrt(sum.squares.value()) * mean;
    decision.gradient_factor = mean;
    if (grad_clip > 0) {
      const double clip = grad_clip / (decision.norm + 1e-6);
      if (clip < 1) decision.gradient_factor *= clip;
    }
  }
  // Finite is judged per element, never by the norm.
  if (decision.overflow.found()) {
    decision.outcome = Outcome::overflow;
  } else {
    decision.outcome = sum.valid > 0 ? Outcome::apply : Outcome::empty;
  }
  return decision;
}

}  // namespace shardrun
