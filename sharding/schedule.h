// The learning rate as a function of the number of updates already applied. Pure arithmetic in
// double, the same bits on every rank; skipped steps do not move it, because they apply nothing.
//
// [Note: schedules] t = applied_steps (0 for the first update), w = warm-up, n = steps:
//
//   warm-up, t < w:   lr * (t + 1) / (w + 1)      never 0; lr itself is reached at t = w
//   constant:         lr
//   cosine:           min_lr + (lr - min_lr) * (1 + cos(pi r)) / 2,   r = (t - w) / (n - w)
//   linear:           min_lr + (lr - min_lr) * (1 - r)
//   wsd:              lr until t = n - d, then linear to min_lr at t = n (warm-up, stable, decay)
//
// From t = n on: min_lr, except for constant.
//
// Warm-up and cosine are nanoGPT's get_lr (github.com/karpathy/nanoGPT, train.py) with
// lr_decay_iters = n.
#pragma once

#include <cstdint>
#include <string>

namespace shardrun {

enum class ScheduleKind { cosine, linear, wsd, constant };

// UsageError for a name that is none of the four.
ScheduleKind schedule_kind(const std::string& name);

struct ScheduleSettings {
  ScheduleKind kind = ScheduleKind::cosine;
  double lr = 0;             // the highest
  double min_lr = 0;         // the last; 0 <= min_lr <= lr
  int64_t warmup = 0;        // updates, >= 0; may exceed steps, then the run ends in its warm-up
  int64_t steps = 0;         // updates until min_lr, >= 1
  int64_t decay_steps = -1;  // wsd: updates of the decay; -1: a fifth of steps, at least one
};

class Schedule {
 public:
  // ConfigError where the values do not fit together.
  explicit Schedule(const ScheduleSettings& settings);

  // The rate of the update that follows applied_steps updates; applied_steps >= 0.
  double lr(int64_t applied_steps) const;

 private:
  ScheduleSettings settings_;
};

}  // namespace shardrun
