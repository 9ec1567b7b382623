#include "sharding/loss_scaler.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "runtime/error.h"

namespace shardrun {
namespace {

constexpr double kSmallest =
    std::numeric_limits<float>::min();  // 2^-126; below it fp32 flushes to zero
constexpr double kLargest = std::numeric_limits<float>::max();

bool usable(double scale) {
  return scale >= kSmallest && scale <= kLargest;
}  // false for NaN

double parse_static(const std::string& policy) {
  const std::string number = policy.substr(policy.find(':') + 1);
  double scale = 0;
  const char* end = number.data() + number.size();
  const auto [stopped_at, error] = std::from_chars(number.data(), end, scale);
  // from_chars reports what is out of range and leaves 0, which is not usable either.
  if (error != std::errc() || stopped_at != end || !usable(scale)) {
    throw ConfigError(
        "--loss-scale-policy {}: got a scale of '{}', wanted a number from 1.2e-38 to 3.4e38, "
        "for instance static:1024",
        policy, number);
  }
  return scale;
}

}  // namespace

LossScaler::Settings LossScaler::settings_of(const std::string& policy) {
  constexpr double k2p15 = 32768, k2p16 = 65536, k2p24 = 16777216, k2p32 = 4294967296;
  constexpr auto row = Rule::in_a_row;
  if (policy == "default") return {row, k2p16, 2000, 1, 1, kLargest, true};
  if (policy == "torch") return {row, k2p16, 2000, 1, kSmallest, kLargest, true};
  if (policy == "deepspeed") return {Rule::since_overflow, k2p16, 1000, 2, 1, kLargest, true};
  if (policy == "megatron") return {row, k2p32, 1000, 2, 1, kLargest, false};
  if (policy == "keras") return {row, k2p15, 2000, 1, kSmallest, kLargest, true};
  if (policy == "apex") return {row, k2p16, 2000, 1, kSmallest, k2p24, true};
  if (policy == "none") return {Rule::fixed, 1, 0, 0, 0, 0, false};
  if (policy.starts_with("static:")) {
    return {Rule::fixed, parse_static(policy), 0, 0, 0, 0, false};
  }
  throw ConfigError(
      "--loss-scale-policy: got '{}', wanted default, torch, deepspeed, megatron, keras, apex, "
      "static:S (a fixed scale S) or none",
      policy);
}

LossScaler::LossScaler(std::string policy, const Settings& settings)
    : policy_(std::move(policy)), settings_(settings) {
  state_.scale = settings.initial;
  state_.hysteresis = settings.hysteresis;
}

LossScaler LossScaler::from_policy(const std::string& policy) {
  return LossScaler(policy, settings_of(policy));
}

LossScaler::Event LossScaler::update(Outcome outcome) {
  Event event{Change::kept, state_.scale, state_.scale};
  if (outcome == Outcome::empty) return event;
  if (outcome == Outcome::overflow) {
    ++state_.consecutive_skips;
    ++state_.total_skips;
    event.change = on_overflow();
    state_.last_overflow = state_.iteration;
  } else {
    state_.consecutive_skips = 0;
    event.change = on_good();
  }
  ++state_.iteration;
  event.scale_after = state_.scale;
  return event;
}

LossScaler::Change LossScaler::on_good() {
  ++state_.good_steps;
  if (settings_.rule == Rule::in_a_row) {
    return state_.good_steps >= settings_.window ? grow() : Change::kept;
  }
  if (settings_.rule == Rule::since_overflow) {
    const int64_t since = state_.iteration - state_.last_overflow - 1;
    return since > 0 && since % settings_.window == 0 ? grow() : Change::kept;
  }
  return Change::kept;
}

LossScaler::Change LossScaler::on_overflow() {
  state_.good_steps = 0;
  if (settings_.rule == Rule::fixed) return Change::kept;
  if (state_.hysteresis > 1) {
    --state_.hysteresis;
    return Change::forgave;
  }
  if (state_.scale <= settings_.floor) {
    return settings_.stop_at_floor ? Change::at_floor : Change::kept;
  }
  state_.scale = std::max(state_.scale * 0.5, settings_.floor);
  return Change::shrank;
}

LossScaler::Change LossScaler::grow() {
  state_.good_steps = 0;
  state_.hysteresis = settings_.hysteresis;
  const double doubled = state_.scale * 2;
  // apex stays at its ceiling, and so does torch at the largest scale that doubling can still
  // reach.
  if (doubled > settings_.ceiling) return Change::kept;
  state_.scale = doubled;
  return Change::grew;
}

void LossScaler::restore(const ScalerState& state) {
  const bool possible = usable(state.scale) && state.good_steps >= 0 && state.hysteresis >= 0 &&
                        state.iteration >= 0 && state.last_overflow >= -1 &&
                        state.last_overflow < state.iteration && state.consecutive_skips >= 0 &&
                        state.total_skips >= state.consecutive_skips;
  if (!possible) {
    throw DataError(
        "saved loss scaler: got scale {}, {} good steps, hysteresis {}, iteration {}, last "
        "overflow "
        "{}, skips {} of {}; wanted a positive fp32 scale and counters that fit together",
        state.scale, state.good_steps, state.hysteresis, state.iteration, state.last_overflow,
        state.consecutive_skips, state.total_skips);
  }
  state_ = state;
  if (settings_.rule == Rule::fixed) state_.scale = settings_.initial;
}

const char* name_of(LossScaler::Change change) {
  switch (change) {
    case LossScaler::Change::kept:
      return "kept";
    case LossScaler::Change::grew:
      return "grew";
    case LossScaler::Change::shrank:
      return "shrank";
    case LossScaler::Change::forgave:
      return "forgave";
    case LossScaler::Change::at_floor:
      return "at_floor";
  }
  return "unknown";
}

}  // namespace shardrun
