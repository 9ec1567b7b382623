#include "sharding/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/error.h"

namespace shardrun {
namespace {

constexpr ScheduleKind kKinds[] = {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::wsd,
                                   ScheduleKind::constant};

ScheduleSettings settings(ScheduleKind kind) {
  return {kind, 1e-3, 1e-4, 100, 2000, -1};
}

// nanoGPT's get_lr, line by line, with libm's cosine.
double nanogpt(int64_t it, double lr, double min_lr, int64_t warmup, int64_t decay) {
  if (it < warmup) return lr * (it + 1) / (warmup + 1);
  if (it > decay) return min_lr;
  const double ratio = static_cast<double>(it - warmup) / static_cast<double>(decay - warmup);
  return min_lr + 0.5 * (1.0 + std::cos(M_PI * ratio)) * (lr - min_lr);
}

TEST(Schedule, cosine_is_nanogpts) {
  const Schedule schedule(settings(ScheduleKind::cosine));
  for (int64_t t = 0; t < 2200; ++t) {
    const double wanted = nanogpt(t, 1e-3, 1e-4, 100, 2000);
    ASSERT_NEAR(schedule.lr(t), wanted, 1e-15 * 1e-3 * 4) << t;
  }
}

TEST(Schedule, fixed_points_are_exact) {
  for (const ScheduleKind kind : kKinds) {
    const Schedule schedule(settings(kind));
    EXPECT_EQ(schedule.lr(0), 1e-3 * 1 / 101);
    EXPECT_EQ(schedule.lr(99), 1e-3 * 100 / 101);
    EXPECT_EQ(schedule.lr(100), 1e-3);
    const double last = kind == ScheduleKind::constant ? 1e-3 : 1e-4;
    EXPECT_EQ(schedule.lr(2000), last);
    EXPECT_EQ(schedule.lr(int64_t{1} << 40), last);
  }
}

TEST(Schedule, midpoints) {
  EXPECT_DOUBLE_EQ(Schedule(settings(ScheduleKind::cosine)).lr(1050), 5.5e-4);
  EXPECT_DOUBLE_EQ(Schedule(settings(ScheduleKind::linear)).lr(1050), 5.5e-4);
  const Schedule wsd(settings(ScheduleKind::wsd));  // decays from 1600
  EXPECT_EQ(wsd.lr(1050), 1e-3);
  EXPECT_EQ(wsd.lr(1600), 1e-3);
  EXPECT_LT(wsd.lr(1601), 1e-3);
  EXPECT_DOUBLE_EQ(wsd.lr(1800), 5.5e-4);
  EXPECT_EQ(Schedule(settings(ScheduleKind::constant)).lr(1050), 1e-3);
}

TEST(Schedule, rises_then_falls_inside_its_bounds) {
  for (const ScheduleKind kind : kKinds) {
    for (const int64_t warmup : {0, 1, 7, 60, 99, 100, 250}) {
      for (const int64_t steps : {1, 2, 60, 100}) {
        for (const int64_t decay : {-1, 0, 1, 50, 1000}) {
          const Schedule schedule({kind, 0.3, 0.1, warmup, steps, decay});
          for (int64_t t = 0; t < 300; ++t) {
            const double now = schedule.lr(t), next = schedule.lr(t + 1);
            ASSERT_GT(now, 0);
            ASSERT_LE(now, 0.3);
            if (t + 1 < warmup) {
              ASSERT_LT(now, next);
            }
            if (t >= warmup) {
              ASSERT_GE(now, next) << t << " of " << steps << ", " << warmup;
            }
            if (t >= warmup) {
              ASSERT_GE(now, 0.1);
            }
          }
        }
      }
    }
  }
}

TEST(Schedule, no_warmup_starts_at_lr) {
  for (const ScheduleKind kind : kKinds) EXPECT_EQ(Schedule({kind, 1, 0, 0, 10, -1}).lr(0), 1);
}

TEST(Schedule, refuses_what_does_not_fit) {
  const auto refuse = [](auto spoil) {
    ScheduleSettings bad = settings(ScheduleKind::cosine);
    spoil(bad);
    EXPECT_THROW(Schedule{bad}, ConfigError);
  };
  refuse([](ScheduleSettings& s) { s.lr = -1; });
  refuse([](ScheduleSettings& s) { s.lr = std::nan(""); });
  refuse([](ScheduleSettings& s) { s.lr = std::numeric_limits<double>::infinity(); });
  refuse([](ScheduleSettings& s) { s.min_lr = 2e-3; });
  refuse([](ScheduleSettings& s) { s.min_lr = -1; });
  refuse([](ScheduleSettings& s) { s.min_lr = std::nan(""); });
  refuse([](ScheduleSettings& s) { s.warmup = -1; });
  refuse([](ScheduleSettings& s) { s.steps = 0; });
  EXPECT_THROW(Schedule(settings(ScheduleKind::cosine)).lr(-1), InternalError);
}

TEST(Schedule, names) {
  EXPECT_EQ(schedule_kind("cosine"), ScheduleKind::cosine);
  EXPECT_EQ(schedule_kind("linear"), ScheduleKind::linear);
  EXPECT_EQ(schedule_kind("wsd"), ScheduleKind::wsd);
  EXPECT_EQ(schedule_kind("constant"), ScheduleKind::constant);
  EXPECT_THROW(schedule_kind("cosin"), UsageError);
}

}  // namespace
}  // namespace shardrun
