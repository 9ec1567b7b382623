#include "launch/train/saver.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace shardrun {
namespace {

// Adds the time that it lives.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum) {}
  ~Stopwatch() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin_;
    sum_ += spent.count();
  }

 private:
  double& sum_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Errors of a save are the same on every rank, which leave together; the first one speaks.
void agreed(RankContext& ranks, FunctionRef<void()> action) {
  try {
    action();
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    throw AgreedError(error.code(), error.what(), ranks.leads());
  }
}

}  // namespace

bool saves_beside_training(const Config& config) {
  return config.save() == "async" && config.save_every() > 0 && !config.dry_run();
}

int64_t set_bytes(const Model& model, const StepOptions& options) {
  const int64_t master = has_master(options.shard.precision) ? 4 : 2;
  return model.parameter_count() * (master + 8);
}

Saver::Saver(const Config& config, RankContext& ranks, TrainStep& step, StateCopy* copy,
             Stream& stream, const Fault& fault)
    : config_(config), ranks_(ranks), step_(step), copy_(copy), stream_(stream), fault_(fault) {}

void Saver::save(const CheckpointState& state, bool last) {
  finish();
  before_ = stood_still_;
  SaveOptions options;
  options.fault = &fault_;
  options.after_commit = [out = config_.out(), last_ones = config_.keep_last(),
                          every = config_.keep_every(), run = state.run, step = state.step] {
    rotate_checkpoints(out, last_ones, every, run, step);
  };
  if (copy_ != nullptr && !last) {
    const Stopwatch watch(stood_still_);
    std::vector<CheckpointPiece> pieces = copy_->take(step_, stream_);
    agreed(ranks_, [&] {
      save_ = std::make_unique<BackgroundSave>(config_.out(), state, std::move(pieces), ranks_.comm,
                                               options);
    });
    return;
  }
  std::string folder;
  StreamSource source(stream_);
  options.source = &source;
  {
    const Stopwatch watch(stood_still_);
    agreed(ranks_, [&] {
      folder = save_checkpoint(config_.out(), state, pieces_of(step_), ranks_.comm, options);
    });
  }
  tell(folder, stood_still_ - before_, stood_still_ - before_);
}

void Saver::advance() {
  if (!save_) return;
  bool through = false;
  {
    const Stopwatch watch(stood_still_);
    agreed(ranks_, [&] { through = save_->advance(); });
  }
  if (!through) return;
  tell(save_->folder().string(), stood_still_ - before_, save_->seconds());
  save_.reset();
}

void Saver::finish() {
  while (save_) advance();
}

void Saver::tell(const std::string& folder, double stood, double wrote) {
  longest_ = std::max(longest_, wrote);
  messages_.push_back(
      fmt::format("saved {} in {:.3f} s, training stood still for {:.3f} s", folder, wrote, stood));
}

std::vector<std::string> Saver::messages() {
  return std::exchange(messages_, {});
}

}  // namespace shardrun
