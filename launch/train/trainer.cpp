#include "launch/train/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "kernels/loss.h"
#include "launch/commands.h"
#include "launch/report/report.h"
#include "launch/signals.h"
#include "launch/train/environment.h"

namespace shardrun {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

static constexpr const char* kPeerFolder = "/dev/shm";

// The first rank's text.
static std::string broadcast_text(Communicator& comm, std::string text) {
  auto size = static_cast<int64_t>(text.size());
  comm.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0);
  text.resize(static_cast<size_t>(size));
  comm.broadcast(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

// ---- data as leaves

DatasetLeaves::DatasetLeaves(const Dataset& training, const Dataset& validation,
                             int64_t global_batch, int64_t micro_batch, bool one_batch)
    : training_(training),
      validation_(validation),
      global_batch_(global_batch),
      micro_batch_(micro_batch),
      one_batch_(one_batch) {}

void DatasetLeaves::training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) {
  const size_t length = static_cast<size_t>(training_.seq_len());
  const int64_t first =
      next_sample(one_batch_ ? 0 : step) + first_sample(0, global_batch_, leaf, micro_batch_);
  for (int64_t row = 0; row < micro_batch_; ++row) {
    training_.fill(first + row, {tokens.as<int32_t>() + row * length, length},
                   {targets.as<int32_t>() + row * length, length});
  }
}

void DatasetLeaves::go_on(int64_t step, int64_t sample) {
  from_step_ = step;
  from_sample_ = sample;
}

int64_t DatasetLeaves::next_sample(int64_t step) const {
  if (one_batch_) return 0;
  return from_sample_ + (step - from_step_) * global_batch_;
}

int64_t DatasetLeaves::evaluation_leaves() const {
  return (validation_.evaluation_windows() + micro_batch_ - 1) / micro_batch_;
}

void DatasetLeaves::evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) {
  const size_t length = static_cast<size_t>(validation_.seq_len());
  for (int64_t row = 0; row < micro_batch_; ++row) {
    const int64_t window = leaf * micro_batch_ + row;
    const std::span<int32_t> in{tokens.as<int32_t>() + row * length, length};
    const std::span<int32_t> out{targets.as<int32_t>() + row * length, length};
    if (window < validation_.evaluation_windows()) {
      validation_.fill_evaluation(window, in, out);
    } else {  // the last leaf may have rows to spare
      std::fill(in.begin(), in.end(), 0);
      std::fill(out.begin(), out.end(), kernels::kIgnoreTarget);
    }
  }
}

// ---- set-up

Trainer::Trainer(const Config& given, RankContext& ranks)
    : config_(with_defaults(given)), ranks_(ranks), device_(config_, ranks) {
  require_equal(ranks.comm, "the build", version());
  require_equal(ranks.comm, "the configuration", to_textproto(config_));
  agree(ranks.comm, [&] {
    const char* fault = std::getenv("SHARDRUN_FAULT");
    fault_ = Fault::parse(fault ? fault : "");
    if (config_.has_init_from() && HuggingFaceFolder::is_one(config_.init_from())) {
      hugging_face_.emplace(HuggingFaceFolder::open(config_.init_from()));
      adopt_model(config_, given, hugging_face_->config());
    }
    batch_ = resolve_batch(config_, ranks.comm.size());
    config_.set_micro_batch(batch_.micro_batch);
    config_.set_global_batch(batch_.global_batch);
    open_data();
  });
  agree(ranks.comm, [&] { check_out(); });
  agree(ranks.comm, [&] { make_step(); });
  require_equal(ranks.comm, "the numerics key", numerics_key_);
  resume();
  if (!config_.dry_run()) {
    probe_checkpoints(config_.out(), set_bytes(*model_, options_), ranks.comm.rank(),
                      ranks.comm.size(),
                      [&](FunctionRef<void()> action) { agree(ranks.comm, action); });
  }
  agree(ranks.comm, [&] { open_out(); });
  open_peers();
  print_header();
  let_signals_ask_to_stop();
}

void Trainer::open_data() {
  if (!config_.has_data()) throw UsageError("train: --data is missing, wanted a text or token file");
  if (!config_.has_out() && !config_.dry_run()) {
    throw UsageError("train: --out is missing, wanted a folder for checkpoints and metrics");
  }
  tokenizer_ = make_tokenizer(config_.tokenizer());
  data_.emplace(config_.data(), config_.has_val_data() ? config_.val_data() : "", *tokenizer_);
  const GptConfig gpt = gpt_config(config_, tokenizer_->vocabulary());
  // What is resolved is written down: a checkpoint's config alone rebuilds the model.
  config_.set_vocab(gpt.vocabulary);
  config_.set_seq_len(gpt.context);
  training_.emplace(
      data_->training(gpt.context, gpt.vocabulary, static_cast<uint64_t>(config_.seed())));
  validation_.emplace(data_->validation(gpt.context, gpt.vocabulary));
  training_->samples_per_epoch();
  if (config_.eval_every() > 0) validation_->evaluation_windows();
  leaves_.emplace(*training_, *validation_, batch_.global_batch, batch_.micro_batch,
                  config_.overfit_one_batch());
  model_ = std::make_unique<Gpt>(gpt);
}

void Trainer::check_out() {
  if (config_.dry_run() || !ranks_.leads()) return;
  folder_.emplace(config_.out());
  folder_->hold();
  if (config_.resume() == "no" && newest_checkpoint(config_.out())) {
    throw ConfigError(
        "--resume no: {} holds checkpoints of an earlier run; continue it with --resume auto, or "
        "choose another --out",
        config_.out());
  }
}

static void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  if (!file) throw CannotCreateError("{}: cannot write the file", path.string());
}

// Last of the set-up: a run that is refused leaves nothing behind.
void Trainer::open_out() {
  if (config_.dry_run() || !ranks_.leads()) return;
  const fs::path out = config_.out();
  std::error_code error;
  fs::create_directories(out / "checkpoints", error);
  if (error || ::access(out.c_str(), W_OK) != 0) {
    throw CannotCreateError("--out {}: cannot create or write the folder ({})", out.string(),
                            error ? error.message() : "not writable");
  }
  folder_->sign(goes_on_);
  write_file(out / "config.textproto", to_textproto(config_));
  write_file(out / "env.json", environment_json(ranks_, device_, numerics_key_));
  metrics_ = std::make_unique<MetricsWriter>((out / "metrics.jsonl").string(), first_step_);
  if (first_step_ < config_.steps()) {
    tensorboard_ = std::make_unique<TensorBoardWriter>((out / "tb").string());
  }
}

void Trainer::make_step() {
  options_ = step_options(config_, batch_, ranks_.comm.size(), device_.comm().transport(),
                          config_.seq_len());
  numerics_key_ = numerics_key(config_, options_, device_);
  const double min_lr = config_.has_min_lr()                ? config_.min_lr()
                        : config_.schedule() == "constant" ? config_.lr()
                                                           : config_.lr() / 10;
  schedule_.emplace(ScheduleSettings{.kind = schedule_kind(config_.schedule()),
                                     .lr = config_.lr(),
                                     .min_lr = min_lr,
                                     .warmup = config_.warmup(),
                                     .steps = config_.steps()});
  schedule_text_ = fmt::format("{} lr={} min-lr={} warmup={} steps={}", config_.schedule(),
                               config_.lr(), min_lr, config_.warmup(), config_.steps());
  const std::string policy = scaler_policy(config_);
  device_.require(options_.shard.precision);
  Device* gpu = device_.stream().device();
  device_.plan_memory(ranks_, options_.micro_batch,
                      [&](int64_t micro_batch, Communicator& comm, Memory& memory, Stream& stream) {
                        StepOptions options = options_;
                        options.micro_batch = micro_batch;
                        options.global_batch = micro_batch * batch_.leaves;
                        TrainStep rehearsal(*model_, options, policy, comm, memory, stream);
                        std::optional<StateCopy> copy;
                        if (saves_beside_training(config_)) copy.emplace(rehearsal, memory, gpu);
                        rehearsal.initialize();
                        rehearsal(0, config_.lr(), *leaves_);
                        rehearsal.evaluate(1, *leaves_);
                      });
  step_ = std::make_unique<TrainStep>(*model_, options_, policy, device_.comm(), device_.memory(),
                                      device_.stream());
  if (saves_beside_training(config_)) {
    copy_.emplace(*step_, device_.memory(), gpu);
  }
  saver_.emplace(config_, ranks_, *step_, copy_ ? &*copy_ : nullptr, device_.stream(), fault_);
}

// [Note: what is resumed] auto takes the newest set that is sound. Damage shows when a set is opened, or
// when a rank reads the chunks of its shard, of which all ranks together read every one; then the next
// older set is tried, and a line says so. Where there were sets and none is sound the run stops: it
// would start from zero over what is there.
void Trainer::resume() {
  std::vector<fs::path> sets;
  const bool automatic = config_.resume() == "auto";
  if (!config_.dry_run() && config_.resume() != "no") {
    if (automatic) {
      sets = named_checkpoints(config_.out());
      std::reverse(sets.begin(), sets.end());
    } else {
      sets.push_back(config_.resume());
    }
  }
  std::string names;
  for (const fs::path& set : sets) names += set.string() + "\n";
  require_equal(ranks_.comm, "the list of checkpoints", names);
  step_->initialize();
  const std::string newest = sets.empty() ? "" : sets[0].filename().string();
  const int64_t newest_step = newest.starts_with("step-") ? std::atoll(newest.c_str() + 5) : -1;
  bool resumed = automatic && resume_from_peers(newest_step);
  for (const fs::path& set : sets) {
    if (resumed) break;
    resumed = resume_from(set, automatic);
  }
  agree(ranks_.comm, [&] {
    if (resumed || config_.dry_run() || !automatic) return;
    const std::string latest = latest_name(config_.out());
    if (sets.empty() && latest.empty()) return;
    throw DataError(
        "--resume auto: {}: {}, and the run is not begun anew over what is there; choose another "
        "--out, or remove the folder to start from zero",
        (fs::path(config_.out()) / "checkpoints").string(),
        sets.empty() ? "the set that `latest` names, " + latest + ", is gone"
                     : fmt::format("none of {} checkpoints is sound", sets.size()));
  });
  if (!resumed) {
    agree(ranks_.comm, [&] {
      if (hugging_face_) {
        hugging_face_->check(*model_);
        restore_parameters(*step_, *hugging_face_);
      } else if (config_.has_init_from()) {
        CheckpointReader reader = CheckpointReader::open(config_.init_from());
        restore_parameters(*step_, reader);
      }
    });
  }
  hugging_face_.reset();
  step_->state().refresh_compute(device_.comm(), device_.stream());
}

bool Trainer::resume_from(const fs::path& set, bool may_be_damaged) {
  std::optional<CheckpointReader> reader;
  const auto attempt = [&](FunctionRef<void()> action) {
    try {
      agree(ranks_.comm, action);
      return true;
    } catch (const AgreedError& error) {
      const bool damaged = error.code() == ExitCode::data || error.code() == ExitCode::no_input;
      if (!may_be_damaged || !damaged) throw;
      if (error.prints()) {
        std::fprintf(stderr, "warning: %s is not sound and is left alone: %s\n", set.c_str(),
                     error.what());
      }
      return false;
    }
  };
  if (!attempt([&] { reader.emplace(CheckpointReader::open(set)); })) return false;
  // A sound set of something else is not damage: there is nothing older to look for.
  agree(ranks_.comm, [&] { check_holds(*step_, *reader, true); });
  if (!attempt([&] { restore(*step_, *reader); })) return false;
  agree(ranks_.comm, [&] { take_state(reader->state(), reader->folder().string()); });
  last_saved_ = first_step_;
  std::error_code error;
  goes_on_ = fs::equivalent(reader->folder().parent_path(),
                            fs::path(config_.out()) / "checkpoints", error);
  return true;
}

// A step that is newer than every set on the disk.
bool Trainer::resume_from_peers(int64_t newest_step) {
  if (!config_.peer_snapshot() || config_.dry_run()) return false;
  run_ = broadcast_text(ranks_.comm, folder_ ? folder_->run() : "");
  const PeerSet peers = find_peer_snapshot(run_, ranks_.local_rank == 0, ranks_.comm, kPeerFolder);
  if (peers.step <= newest_step) return false;
  const CheckpointState state = restore(*step_, peers, ranks_.comm, device_.stream());
  agree(ranks_.comm, [&] { take_state(state, "the memory of the ranks' nodes"); });
  goes_on_ = true;
  return true;
}

void Trainer::open_peers() {
  if (!config_.peer_snapshot() || config_.dry_run()) return;
  const std::string before = run_;
  run_ = broadcast_text(ranks_.comm, folder_ ? folder_->run() : "");
  if (before != run_ && ranks_.local_rank == 0) remove_peer_snapshots(before, kPeerFolder);
  // A rank of the next node, where there is one.
  const int world = ranks_.comm.size();
  const int distance = ranks_.local_size < world ? ranks_.local_size : 1;
  int64_t widest = distance;
  ranks_.comm.all_reduce_max({&widest, 1});
  agree(ranks_.comm, [&] {
    peers_.emplace(*step_, ranks_.comm, run_, static_cast<int>(widest), fault_, kPeerFolder);
  });
}

void Trainer::take_state(const CheckpointState& saved, const std::string& from) {
  first_step_ = saved.step;
  first_tokens_ = saved.tokens;
  resumed_from_ = from;
  int64_t sample = saved.step * batch_.global_batch;  // what old sets mean
  int64_t samples = training_->samples_per_epoch();
  for (const auto& [key, value] : saved.data_position) {
    if (key == "sample") {
      sample = value;
    } else if (key == "samples_per_epoch") {
      samples = value;
    } else {
      throw DataError("{}: the data position has an unknown key `{}`: written by a newer version",
                      resumed_from_, key);
    }
  }
  leaves_->go_on(saved.step, sample);
  if (!ranks_.leads()) return;
  const auto warn = [&](const char* what, const std::string& then, const std::string& now) {
    if (then == now) return;
    std::fprintf(stderr, "warning: %s was written with %s\n  then: %s\n  now:  %s\n",
                 resumed_from_.c_str(), what, then.c_str(), now.c_str());
  };
  warn("other numerics; the run goes on, its bits differ from an undisturbed one",
       saved.numerics_key, numerics_key_);
  if (!saved.schedule.empty()) warn("another schedule", saved.schedule, schedule_text_);
  warn("data of another length; samples come again or are left out",
       fmt::format("{} samples an epoch", samples),
       fmt::format("{} samples an epoch", training_->samples_per_epoch()));
}

void Trainer::print_header() const {
  if (!ranks_.leads()) return;
  const int world = ranks_.comm.size();
  std::printf("shardrun %s, %d rank%s over %s on %s, %d thread%s each, %s\n", version(), world,
              world == 1 ? "" : "s", device_.comm().transport(), device_.name().c_str(),
              device_.threads(), device_.threads() == 1 ? "" : "s", numerics_key_.c_str());
  std::printf("model: %s, %lld parameters in %zu units, vocabulary %lld, sequence %lld\n",
              config_.model().c_str(), static_cast<long long>(model_->parameter_count()),
              model_->units().size(), static_cast<long long>(model_->vocabulary()),
              static_cast<long long>(options_.seq_len));
  std::printf("%s\n", decay_text(*model_).c_str());
  std::printf("data: %lld training tokens, %lld held out; %lld leaves of %lld sequences a step, "
              "%lld micro-step%s\n",
              static_cast<long long>(training_->tokens()),
              static_cast<long long>(validation_->tokens()), static_cast<long long>(batch_.leaves),
              static_cast<long long>(batch_.micro_batch),
              static_cast<long long>(batch_.micro_steps), batch_.micro_steps == 1 ? "" : "s");
  std::printf("memory of a rank: %s kept, %s in a step (%s)\n",
              bytes_text(static_cast<double>(device_.plan().persistent_bytes)).c_str(),
              bytes_text(static_cast<double>(device_.plan().arena_bytes() -
                                             device_.plan().persistent_bytes)).c_str(),
              fmt::format("zero {}, {}", options_.shard.zero, config_.precision()).c_str());
  if (!resumed_from_.empty()) {
    std::printf("resumed from %s, %lld steps done\n", resumed_from_.c_str(),
                static_cast<long long>(first_step_));
  }
  std::fflush(stdout);
}

// ---- the loop

int Trainer::run() {
  const int64_t last = config_.dry_run() ? first_step_ + 1 : config_.steps();
  started_ = Clock::now();
  if (ranks_.leads()) {
    progress_ = std::make_unique<Progress>(stdout, stdout_is_terminal(), first_step_, last,
                                           config_.log_every());
  }
  if (first_step_ >= last && progress_) {
    progress_->message(fmt::format("nothing to do: {} of {} steps are done", first_step_, last));
  }
  bool stopped = false;
  int64_t done = first_step_;
  while (done < last && !stopped) {
    const auto begin = Clock::now();
    StepMetrics metrics = train_one(done);
    ++done;
    stopped = step_stops_ || (config_.has_stop_after() && done >= config_.stop_after());
    const bool evaluates = config_.eval_every() > 0 && !config_.dry_run() &&
                           (done == last || done % config_.eval_every() == 0);
    if (evaluates) evaluate(metrics);
    if (metrics_) metrics_->write(metrics);
    if (tensorboard_) tensorboard_->write(metrics);
    if (progress_) progress_->step(metrics);
    longest_round_ = std::max(
        longest_round_, std::chrono::duration<double>(Clock::now() - begin).count());
    const bool saves = config_.save_every() > 0 && done % config_.save_every() == 0;
    const bool ends = done == last || stopped;
    if (writers_quiet_ && saver_->busy()) saver_->advance();
    fault_.at("step", ranks_.comm.rank(), done);
    if (!config_.dry_run() && (saves || ends)) save(done, ends);
    tell_of_saves();
    if (peers_ && !ends) peers_->take(state_now(done), device_.stream());
  }
  // Out of peers' memory, after the last step: it has not been on the disk yet.
  if (done >= last && !config_.dry_run()) save(done, true);
  tell_of_saves();
  if (peers_) {
    ranks_.comm.barrier();
    if (ranks_.local_rank == 0) remove_peer_snapshots(run_, kPeerFolder);
  }
  report();
  if (stopped && done < last && progress_) {
    progress_->message(fmt::format("stopped after {} of {} steps; run again to go on", done, last));
  }
  progress_.reset();
  return stopped && done < last ? static_cast<int>(ExitCode::run_again) : 0;
}

bool Trainer::should_stop(int64_t done) const {
  if (asked_to_stop()) return true;
  if (!config_.has_max_time()) return false;
  // The step that asks is the last where one more, and what this one saves before it, would not leave
  // the time for the last save.
  const bool saves = config_.save_every() > 0 && (done + 1) % config_.save_every() == 0;
  const std::chrono::duration<double> spent = Clock::now() - started_;
  return spent.count() + 2 * longest_round_ + (saves ? 2 : 1) * saver_->cost() >=
         static_cast<double>(parse_duration(config_.max_time()));
}

StepMetrics Trainer::train_one(int64_t done) {
  const auto begin = Clock::now();
  StepMetrics metrics;
  metrics.lr = schedule_->lr(step_->applied_steps());
  const StepReport report = (*step_)(done, metrics.lr, *leaves_, should_stop(done), saver_->quiet());
  const std::chrono::duration<double, std::milli> spent = Clock::now() - begin;
  step_stops_ = report.decision.stop;
  writers_quiet_ = report.decision.writers_quiet;

  const int64_t step_tokens = batch_.global_batch * options_.seq_len;
  metrics.step = done + 1;
  metrics.applied_steps = step_->applied_steps();
  metrics.loss = report.decision.loss;
  metrics.grad_norm = report.decision.norm;
  metrics.loss_scale = report.loss_scale;
  metrics.skipped = !report.decision.apply();
  metrics.tokens = first_tokens_ + (metrics.step - first_step_) * step_tokens;
  metrics.step_ms = spent.count();
  metrics.tokens_per_s = static_cast<double>(step_tokens) / (spent.count() / 1000);
  metrics.comm_exposed_ms = report.exposed_seconds * 1e3;
  metrics.mem_bytes = static_cast<int64_t>(device_.plan().arena_bytes());
  if (metrics.skipped) handle_skip(report, metrics.step);
  return metrics;
}

void Trainer::handle_skip(const StepReport& report, int64_t done) {
  if (report.decision.outcome == Outcome::empty) {
    if (progress_) {
      progress_->message(fmt::format("step {}: skipped, no valid target in the batch", done));
    }
    return;
  }
  if (progress_) {
    progress_->message(fmt::format("step {}: skipped, {}; loss scale {} -> {}", done,
                                   report.overflow_text, report.scaler.scale_before,
                                   report.scaler.scale_after));
  }
  const int64_t in_a_row = step_->scaler().consecutive_skips();
  if (report.scaler.stop() || in_a_row >= config_.max_skips()) {
    agree(ranks_.comm, [&] {
      throw DataError("step {}: {} in a row were skipped at loss scale {}; the first tensor: {}. Lower "
                      "--lr, or look at the data",
                      done, in_a_row, report.loss_scale, report.overflow_text);
    });
  }
}

void Trainer::evaluate(StepMetrics& metrics) {
  const int64_t all = leaves_->evaluation_leaves();
  const int64_t asked = config_.eval_steps() < 0 ? all : config_.eval_steps() * batch_.leaves;
  const Evaluation evaluation = step_->evaluate(std::min(all, asked), *leaves_);
  metrics.val_loss = evaluation.loss;
  if (progress_) {
    progress_->message(fmt::format("step {}: validation loss {:.4f} over {} tokens", metrics.step,
                                   evaluation.loss, evaluation.valid));
  }
}

void Trainer::save(int64_t done, bool last) {
  if (done == last_saved_) {
    if (last) saver_->finish();
    return;
  }
  saver_->save(state_now(done), last);
  last_saved_ = done;
}

CheckpointState Trainer::state_now(int64_t done) {
  CheckpointState state = state_of(*step_, done);
  state.tokens =
      first_tokens_ + (done - first_step_) * batch_.global_batch * options_.seq_len;
  state.numerics_key = numerics_key_;
  state.config_text = to_textproto(config_);
  state.writer_version = version();
  state.schedule = schedule_text_;
  state.data_position = {{"sample", leaves_->next_sample(done)},
                         {"samples_per_epoch", training_->samples_per_epoch()}};
  state.run = folder_ ? folder_->run() : run_;
  return state;
}

void Trainer::tell_of_saves() {
  for (const std::string& message : saver_->messages()) {
    if (progress_) progress_->message(message);
  }
}

// The checkpoint is written: a page that fails is no failure of the run.
void Trainer::report() const {
  if (!metrics_) return;
  try {
    progress_->message("report " + write_report(config_.out()));
  } catch (const Error& error) {
    progress_->message(fmt::format("warning: no report: {}", error.what()));
  }
}

int run_train(const Config& config, RankContext& ranks) { return Trainer(config, ranks).run(); }

}  // namespace shardrun
