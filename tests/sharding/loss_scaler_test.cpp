// Golden traces, written by hand from each policy's rule, and what holds for every policy.
#include "sharding/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/error.h"

namespace shardrun {
namespace {

using Outcome = LossScaler::Outcome;
using Change = LossScaler::Change;

const std::vector<std::string> kPolicies = {"default", "torch", "deepspeed",   "megatron",
                                            "keras",   "apex",  "static:1024", "none"};

struct Row {
  Outcome outcome;
  int64_t times;
  double scale;
  std::string change;
  int64_t skips;
  std::string text;
};

std::vector<Row> read_golden(const std::string& policy) {
  const std::string path =
      SHARDRUN_GOLDEN_DIR "/loss_scaler_" + policy.substr(0, policy.find(':')) + ".txt";
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  std::vector<Row> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string outcome;
    Row row;
    row.text = line;
    EXPECT_TRUE(words >> outcome >> row.times >> row.scale >> row.change >> row.skips) << line;
    EXPECT_TRUE(outcome == "good" || outcome == "overflow" || outcome == "empty") << line;
    row.outcome = outcome == "good"       ? Outcome::good
                  : outcome == "overflow" ? Outcome::overflow
                                          : Outcome::empty;
    rows.push_back(row);
  }
  EXPECT_GE(rows.size(), 5u) << path;
  return rows;
}

// A random outcome, with stretches that are mostly good, long enough for every window.
std::vector<Outcome> random_outcomes(uint32_t seed, int count) {
  std::mt19937 random(seed);
  std::vector<Outcome> outcomes;
  int rare = 5000;
  for (int i = 0; i < count; ++i) {
    if (i % 10000 == 0) rare = i % 20000 == 0 ? 5000 : 2;
    const uint32_t draw = random();
    outcomes.push_back(draw % rare == 0      ? Outcome::overflow
                       : draw / 16 % 50 == 0 ? Outcome::empty
                                             : Outcome::good);
  }
  return outcomes;
}

TEST(LossScaler, follows_the_golden_traces) {
  for (const std::string& policy : kPolicies) {
    LossScaler scaler = LossScaler::from_policy(policy);
    for (const Row& row : read_golden(policy)) {
      const double before = scaler.scale();
      for (int64_t i = 1; i <= row.times; ++i) {
        const LossScaler::Event event = scaler.update(row.outcome);
        const bool last = i == row.times;
        const std::string where = policy + ": " + row.text + ", number " + std::to_string(i);
        ASSERT_EQ(name_of(event.change), last ? row.change : "kept") << where;
        ASSERT_EQ(event.scale_before, before) << where;
        ASSERT_EQ(event.scale_after, last ? row.scale : before) << where;
        ASSERT_EQ(scaler.scale(), event.scale_after) << where;
        ASSERT_EQ(event.stop(), last && row.change == "at_floor") << where;
      }
      ASSERT_EQ(scaler.consecutive_skips(), row.skips) << policy << ": " << row.text;
    }
  }
}

TEST(LossScaler, growth_past_fp32_is_refused) {
  for (const char* policy : {"default", "torch", "deepspeed", "megatron", "keras"}) {
    LossScaler scaler = LossScaler::from_policy(policy);
    for (int i = 0; i < 300000; ++i) scaler.update(Outcome::good);
    EXPECT_EQ(scaler.scale(), std::ldexp(1.0, 127)) << policy;
    scaler.update(Outcome::overflow);
    scaler.update(Outcome::overflow);
    EXPECT_LT(scaler.scale(), std::ldexp(1.0, 127)) << policy << " must come back down";
  }
}

TEST(LossScaler, a_policy_without_floor_stops_where_fp32_ends) {
  for (const char* policy : {"torch", "keras", "apex"}) {
    LossScaler scaler = LossScaler::from_policy(policy);
    int halvings = 0;
    while (!scaler.update(Outcome::overflow).stop()) ASSERT_LT(++halvings, 200) << policy;
    EXPECT_EQ(scaler.scale(), std::ldexp(1.0, -126)) << policy;
  }
}

TEST(LossScaler, scale_stays_a_usable_power_and_moves_by_two_at_most) {
  for (const std::string& policy : kPolicies) {
    LossScaler scaler = LossScaler::from_policy(policy);
    for (const Outcome outcome : random_outcomes(7, 200000)) {
      const LossScaler::Event event = scaler.update(outcome);
      const double ratio = event.scale_after / event.scale_before;
      ASSERT_EQ(ratio, event.change == Change::grew     ? 2
                       : event.change == Change::shrank ? 0.5
                                                        : 1)
          << policy;
      ASSERT_TRUE(std::isnormal(static_cast<float>(event.scale_after))) << policy;
      ASSERT_EQ(static_cast<double>(static_cast<float>(event.scale_after)), event.scale_after);
      if (outcome == Outcome::good) {
        ASSERT_GE(ratio, 1) << policy;
      }
      if (outcome == Outcome::overflow) {
        ASSERT_LE(ratio, 1) << policy;
      }
    }
  }
}

TEST(LossScaler, empty_steps_change_nothing) {
  for (const std::string& policy : kPolicies) {
    LossScaler with = LossScaler::from_policy(policy);
    LossScaler without = LossScaler::from_policy(policy);
    for (const Outcome outcome : random_outcomes(11, 30000)) {
      with.update(outcome);
      if (outcome != Outcome::empty) without.update(outcome);
      ASSERT_EQ(with.state(), without.state()) << policy;
    }
  }
}

TEST(LossScaler, a_restored_scaler_goes_on_alike) {
  for (const std::string& policy : kPolicies) {
    LossScaler straight = LossScaler::from_policy(policy);
    LossScaler resumed = LossScaler::from_policy(policy);
    int step = 0;
    for (const Outcome outcome : random_outcomes(13, 30000)) {
      if (++step % 997 == 0) {
        LossScaler fresh = LossScaler::from_policy(policy);
        fresh.restore(resumed.state());
        resumed = fresh;
      }
      straight.update(outcome);
      resumed.update(outcome);
      ASSERT_EQ(straight.state(), resumed.state()) << policy << " at step " << step;
    }
  }
}

TEST(LossScaler, counts_skips) {
  LossScaler scaler = LossScaler::from_policy("none");
  for (int i = 0; i < 3; ++i) scaler.update(Outcome::overflow);
  scaler.update(Outcome::good);
  for (int i = 0; i < 2; ++i) scaler.update(Outcome::overflow);
  EXPECT_EQ(scaler.consecutive_skips(), 2);
  EXPECT_EQ(scaler.state().total_skips, 5);
  EXPECT_EQ(scaler.state().iteration, 6);
}

TEST(LossScaler, a_fixed_policy_keeps_its_scale_over_a_restore) {
  ScalerState state;
  state.scale = 256;
  LossScaler fixed = LossScaler::from_policy("static:8");
  fixed.restore(state);
  EXPECT_EQ(fixed.scale(), 8);
  LossScaler moving = LossScaler::from_policy("default");
  moving.restore(state);
  EXPECT_EQ(moving.scale(), 256);
}

TEST(LossScaler, refuses_what_it_cannot_use) {
  for (const char* policy :
       {"", "Default", "static", "static:", "static:0", "static:-1", "static:nan", "static:inf",
        "static:1e39", "static:1e-39", "static:1e999", "static:8x", "static: 8", "dynamic"}) {
    EXPECT_THROW(LossScaler::from_policy(policy), ConfigError) << policy;
  }
  EXPECT_EQ(LossScaler::from_policy("static:0.5").scale(), 0.5);

  LossScaler scaler = LossScaler::from_policy("default");
  const ScalerState good = scaler.state();
  const auto refuse = [&](auto spoil) {
    ScalerState bad = good;
    spoil(bad);
    EXPECT_THROW(scaler.restore(bad), DataError);
    EXPECT_EQ(scaler.state(), good);
  };
  refuse([](ScalerState& s) { s.scale = 0; });
  refuse([](ScalerState& s) { s.scale = std::nan(""); });
  refuse([](ScalerState& s) { s.scale = std::numeric_limits<double>::infinity(); });
  refuse([](ScalerState& s) { s.good_steps = -1; });
  refuse([](ScalerState& s) { s.last_overflow = 3; });
  refuse([](ScalerState& s) { s.consecutive_skips = 1; });
}

}  // namespace
}  // namespace shardrun
