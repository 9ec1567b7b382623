// A training job on one rank, from data to checkpoints: `shardrun train` is made of this.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "launch/checkpoint/hugging_face.h"
#include "launch/data/dataset.h"
#include "launch/metrics/metrics.h"
#include "launch/metrics/progress.h"
#include "launch/metrics/tensorboard.h"
#include "launch/train/job.h"
#include "launch/train/rank_device.h"
#include "launch/train/run_folder.h"
#include "launch/train/saver.h"
#include "sharding/peer_snapshot.h"
#include "sharding/schedule.h"
#include "sharding/snapshot.h"

namespace shardrun {

// The samples of a run as leaves.
class DatasetLeaves : public LeafSource {
 public:
  DatasetLeaves(const Dataset& training, const Dataset& validation, int64_t global_batch,
                int64_t micro_batch, bool one_batch);
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override;
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override;
  int64_t evaluation_leaves() const;  // that cover the whole validation part

  // From `step` on, samples follow from number `sample`: a run that goes on with another global batch
  // goes on in the order where it was.
  void go_on(int64_t step, int64_t sample);
  int64_t next_sample(int64_t step) const;  // the first that step `step` takes

 private:
  const Dataset& training_;
  const Dataset& validation_;
  int64_t global_batch_, micro_batch_;
  bool one_batch_;
  int64_t from_step_ = 0, from_sample_ = 0;
};

class Trainer {
 public:
  // Everything that can fail before the first step fails here, on all ranks together.
  Trainer(const Config& given, RankContext& ranks);
  // Trains to the last step, or until asked to stop; returns the exit code.
  int run();

 private:
  void open_data();
  void check_out();
  void open_out();
  void make_step();
  void resume();
  bool resume_from(const std::filesystem::path& set, bool may_be_damaged);
  bool resume_from_peers(int64_t newest_step);
  void take_state(const CheckpointState& saved, const std::string& from);
  void open_peers();
  CheckpointState state_now(int64_t done);
  void print_header() const;
  StepMetrics train_one(int64_t done);
  void evaluate(StepMetrics& metrics);
  void save(int64_t done, bool last);
  void tell_of_saves();
  void report() const;
  void handle_skip(const StepReport& report, int64_t done);
  bool should_stop(int64_t done) const;

  Config config_;
  RankContext& ranks_;
  RankDevice device_;
  BatchPlan batch_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<RunData> data_;
  std::optional<Dataset> training_, validation_;
  std::optional<DatasetLeaves> leaves_;
  std::unique_ptr<Gpt> model_;
  std::optional<HuggingFaceFolder> hugging_face_;  // --init-from, until it is read
  StepOptions options_;
  std::string numerics_key_, schedule_text_;
  std::unique_ptr<TrainStep> step_;
  std::optional<StateCopy> copy_;  // for saves beside training
  Fault fault_;
  std::optional<RunFolder> folder_;  // of the first rank
  std::optional<Saver> saver_;
  std::string run_;  // its name, on every rank
  std::optional<PeerSnapshot> peers_;
  std::optional<Schedule> schedule_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  std::unique_ptr<Progress> progress_;
  int64_t first_step_ = 0;    // done before this run
  int64_t first_tokens_ = 0;  // and these tokens
  int64_t last_saved_ = -1;
  bool step_stops_ = false;  // the last step's decision: stop after it
  bool writers_quiet_ = false;  // and that every rank's background save waits
  std::string resumed_from_;
  bool goes_on_ = false;  // the run of OUT, not a new one
  std::chrono::steady_clock::time_point started_;
  double longest_round_ = 0;  // seconds of a step with what follows it, saves left out
};

}  // namespace shardrun
