#include "sharding/schedule.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace shardrun {
namespace {

// (1 + cos(pi r)) / 2 for 0 <= r <= 1. Own arithmetic, because libm picks its cosine by processor
// and the rate has to have the same bits on every rank: cos(pi r) = sin(x), x = pi (1/2 - r), by
// the Taylor series up to x^21, whose remainder at |x| <= pi/2 is below 2e-18.
double raised_cosine(double r) {
  constexpr double kPi = 3.14159265358979323846;
  const double x = kPi * (0.5 - r);
  const double x2 = x * x;
  double sum = 1;
  for (int k = 20; k >= 2; k -= 2) sum = 1 - sum * x2 / (k * (k + 1));
  return std::clamp(0.5 * (1 + x * sum), 0.0, 1.0);
}

// Clamped, because the rounded sum may leave the interval by one bit.
double between(double high, double low, double share_of_high) {
  return std::clamp(low + (high - low) * share_of_high, low, high);
}

double progress(int64_t now, int64_t begin, int64_t end) {
  return static_cast<double>(now - begin) / static_cast<double>(end - begin);
}

}  // namespace

ScheduleKind schedule_kind(const std::string& name) {
  if (name == "cosine") return ScheduleKind::cosine;
  if (name == "linear") return ScheduleKind::linear;
  if (name == "wsd") return ScheduleKind::wsd;
  if (name == "constant") return ScheduleKind::constant;
  throw UsageError("--schedule: got '{}', wanted cosine, linear, wsd or constant", name);
}

Schedule::Schedule(const ScheduleSettings& settings) : settings_(settings) {
  ScheduleSettings& s = settings_;
  if (!std::isfinite(s.lr) || s.lr < 0) {
    throw ConfigError("--lr: got {}, wanted a finite number >= 0", s.lr);
  }
  if (!(s.min_lr >= 0 && s.min_lr <= s.lr)) {
    throw ConfigError("--min-lr: got {}, wanted a number from 0 to --lr, which is {}", s.min_lr,
                      s.lr);
  }
  if (s.warmup < 0) throw ConfigError("--warmup: got {}, wanted a number >= 0", s.warmup);
  if (s.steps < 1) throw ConfigError("--steps: got {}, wanted a number >= 1", s.steps);
  if (s.decay_steps < 0) s.decay_steps = std::max<int64_t>(1, s.steps / 5);
  s.decay_steps = std::min(s.decay_steps, s.steps);
}

double Schedule::lr(int64_t applied_steps) const {
  const ScheduleSettings& s = settings_;
  const int64_t t = applied_steps;
  SHARDRUN_CHECK(t >= 0, "got {} applied steps, wanted >= 0", t);
  if (t < s.warmup) {
    return s.lr * static_cast<double>(t + 1) / static_cast<double>(s.warmup + 1);
  }
  if (s.kind == ScheduleKind::constant) return s.lr;
  if (t >= s.steps) return s.min_lr;
  if (s.kind == ScheduleKind::wsd) {
    // A warm-up that reaches into the decay shortens the decay, so that the rate never jumps.
    const int64_t begin = std::max(s.steps - s.decay_steps, s.warmup);
    return t <= begin ? s.lr : between(s.lr, s.min_lr, 1 - progress(t, begin, s.steps));
  }
  if (t == s.warmup) return s.lr;
  const double r = progress(t, s.warmup, s.steps);
  return between(s.lr, s.min_lr, s.kind == ScheduleKind::cosine ? raised_cosine(r) : 1 - r);
}

}  // namespace shardrun
