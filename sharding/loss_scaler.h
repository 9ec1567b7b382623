// The loss scaler: which power keeps fp16 gradients inside their range. A pure state machine; the
// training step reads scale() before backward and calls update() once per step, after the
// optimizer, with what the decision found. Every rank feeds the same decision, so every rank holds
// the same state.
//
// [Note: scaler policies] A policy is a rule that a user may bring from another system, exactly:
//
//   policy     starts at  grows                                shrinks on overflow   limits
//   default    2^16       x2 after 2000 good steps in a row    x0.5                  floor 1, stop
//   torch      2^16       x2 after 2000 good steps in a row    x0.5                  none
//   deepspeed  2^16       x2 each 1000 steps past an overflow  x0.5, 2nd and later   floor 1, stop
//   megatron   2^32       x2 after 1000 good steps in a row    x0.5, 2nd and later   floor 1
//   keras      2^15       x2 after 2000 good steps in a row    x0.5                  none
//   apex       2^16       x2 after 2000 good steps in a row    x0.5                  ceiling 2^24
//   static:S   S          never                                never                 none
//   none       1          never                                never                 none
//
// "2nd and later": the first overflow is forgiven; the pardon comes back only with growth. In
// deepspeed good step number 1001 after an overflow grows, then 2001, 3001, whatever grew between.
// "stop": an overflow while already at the floor ends the run, because nothing is left to try.
//
// Where a policy has no limit of its own, fp32 sets one: a scale that fp32 cannot hold as a normal
// number is not taken (torch refuses growth to infinity itself). At the small end the run stops.
#pragma once

#include <cstdint>
#include <string>

namespace shardrun {

// All that a checkpoint keeps of a scaler, beside the policy's name.
struct ScalerState {
  double scale = 1;
  int64_t good_steps = 0;         // since the last overflow or growth
  int64_t hysteresis = 0;         // overflows until one halves the scale
  int64_t iteration = 0;          // steps that were good or overflowed
  int64_t last_overflow = -1;     // iteration of the last overflow
  int64_t consecutive_skips = 0;  // overflows since the last good step
  int64_t total_skips = 0;        // overflows in all

  friend bool operator==(const ScalerState&, const ScalerState&) = default;
};

class LossScaler {
 public:
  // What the decision found: a step to apply, a gradient that is not finite, or no valid item at
  // all.
  enum class Outcome { good, overflow, empty };

  enum class Change {
    kept,      // same scale
    grew,      // larger
    shrank,    // smaller
    forgave,   // an overflow that only used up hysteresis
    at_floor,  // an overflow at a floor: the run has to stop, the state no longer helps
  };

  struct Event {
    Change change = Change::kept;
    double scale_before = 1;  // what backward used
    double scale_after = 1;   // what the next backward uses
    bool stop() const { return change == Change::at_floor; }
  };

  // ConfigError where the name is unknown or S is not a usable scale. Policies: see the note above.
  static LossScaler from_policy(const std::string& policy);

  const std::string& policy() const { return policy_; }
  double scale() const { return state_.scale; }
  int64_t consecutive_skips() const { return state_.consecutive_skips; }

  // An empty step changes nothing, not even counters.
  Event update(Outcome outcome);

  const ScalerState& state() const { return state_; }

  // Takes over a saved state, also one saved under another policy; static:S and none keep their
  // scale. DataError where the state cannot be a scaler's.
  void restore(const ScalerState& state);

 private:
  enum class Rule { fixed, in_a_row, since_overflow };

  // What tells the policies apart.
  struct Settings {
    Rule rule = Rule::fixed;
    double initial = 1;
    int64_t window = 0;
    int64_t hysteresis = 0;  // overflows until one halves; 1: at once
    double floor = 0;
    double ceiling = 0;
    bool stop_at_floor = false;
  };

  LossScaler(std::string policy, const Settings& settings);
  static Settings settings_of(const std::string& policy);
  Change on_good();
  Change on_overflow();
  Change grow();

  std::string policy_;
  Settings settings_;
  ScalerState state_;
};

const char* name_of(LossScaler::Change change);

}  // namespace shardrun
