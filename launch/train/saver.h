// When and how a run's state goes to disk: in one go or beside training, and what that costs.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "launch/config/config.h"
#include "launch/ranks.h"
#include "sharding/snapshot.h"

namespace shardrun {

// Whether saves of this run need room for a copy of the state. The last save does not: training is
// over then.
bool saves_beside_training(const Config& config);

// Bytes of a set: masters and moments of all ranks.
int64_t set_bytes(const Model& model, const StepOptions& options);

class Saver {
 public:
  // `copy` null: all saves are in one go. All arguments outlive it.
  Saver(const Config& config, RankContext& ranks, TrainStep& step, StateCopy* copy, Stream& stream,
        const Fault& fault);

  // All ranks call, at a step boundary. `last`: the save is through when this returns. What was saved
  // is told by messages(), also of an earlier save.
  void save(const CheckpointState& state, bool last);
  // This rank's part of the save that is on its way can go no further alone; true without one too.
  bool quiet() const { return !save_ || save_->quiet(); }
  // All ranks call, between steps, once all are quiet, as the decision says.
  void advance();
  bool busy() const { return save_ != nullptr; }
  void finish();  // waits for the save that is on its way; all ranks call

  // Lines for people since the last call.
  std::vector<std::string> messages();
  // Seconds that a save from now on takes to be on the disk, after the longest of those so far and what
  // is left of one on its way, at most; 0 before the first.
  double cost() const { return (busy() ? 2 : 1) * longest_; }
  double stood_still() const { return stood_still_; }  // seconds of training lost to saves, so far

 private:
  void tell(const std::string& folder, double stood, double wrote);

  const Config& config_;
  RankContext& ranks_;
  TrainStep& step_;
  StateCopy* copy_;
  Stream& stream_;
  const Fault& fault_;
  std::unique_ptr<BackgroundSave> save_;
  double stood_still_ = 0, before_ = 0;  // before_: when this save began
  double longest_ = 0;                   // seconds of a save, from the call to the disk
  std::vector<std::string> messages_;
};

}  // namespace shardrun
