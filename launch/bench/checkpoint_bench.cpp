// `shardrun bench checkpoint`: writes, reads and exports sets of a model's real state, beside plain
// sequential files of the same size in the same folder, and trains while a set is written.
//
// Times are of the slowest rank, between barriers; of several rounds the median counts, in each of
// which every kind is measured once, so that what else the machine does falls on all of them. What is
// read was dropped from the page cache before.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <optional>

#include "launch/bench/bench.h"
#include "launch/checkpoint/hugging_face.h"
#include "launch/train/job.h"
#include "launch/train/rank_device.h"
#include "launch/train/saver.h"
#include "sharding/checkpoint/file.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr size_t kPlainBlock = size_t{1} << 20;

class DrawnLeaves : public LeafSource {
 public:
  explicit DrawnLeaves(int64_t vocabulary) : vocabulary_(vocabulary) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    for (int64_t i = 0; i < tokens.numel(); ++i) {
      const uint64_t draw =
          mix64(static_cast<uint64_t>(step * 1000 + leaf), static_cast<uint64_t>(i));
      tokens.as<int32_t>()[i] = static_cast<int32_t>(draw % static_cast<uint64_t>(vocabulary_));
      targets.as<int32_t>()[i] = tokens.as<int32_t>()[i];
    }
  }
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override {
    training_leaf(-1, leaf, tokens, targets);
  }

 private:
  int64_t vocabulary_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// A field of /proc/self/status in bytes.
double status_bytes(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(field + ":")) return std::atof(line.c_str() + field.size() + 1) * 1024;
  }
  return 0;
}

// Bytes that a call takes at its peak, above what was there before. Of the process: all its ranks.
double peak_of(FunctionRef<void()> call) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const double before = status_bytes("VmRSS");
  call();
  return std::max(0.0, status_bytes("VmHWM") - before);
}

void drop_from_cache(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
}

class CheckpointBench {
 public:
  CheckpointBench(const Config& given, RankContext& ranks)
      : config_(with_shape(given)), ranks_(ranks), device_(config_, ranks) {
    agree(ranks.comm, [&] { set_up(); });
    device_.plan_memory(
        ranks, options_.micro_batch,
        [&](int64_t micro_batch, Communicator& comm, Memory& memory, Stream& stream) {
          StepOptions options = options_;
          options.global_batch = options.global_batch / options.micro_batch * micro_batch;
          options.micro_batch = micro_batch;
          TrainStep rehearsal(*model_, options, policy_, comm, memory, stream);
          const StateCopy copy(rehearsal, memory, device_.stream().device());
          rehearsal.initialize();
          rehearsal(0, 1e-4, *leaves_);
        });
    step_ = std::make_unique<TrainStep>(*model_, options_, policy_, device_.comm(),
                                        device_.memory(), device_.stream());
    copy_.emplace(*step_, device_.memory(), device_.stream().device());
    step_->initialize();
  }

  ~CheckpointBench() {
    std::error_code ignored;
    if (ranks_.leads()) fs::remove_all(folder_, ignored);
  }

  int run() {
    for (int i = 0; i < 2; ++i) train();
    std::vector<double> plain_write, save, plain_read, load, step, busy_step, stood;
    double save_peak = 0, load_peak = 0;
    for (int round = 0; round < kRounds; ++round) {
      plain_write.push_back(timed([&] { write_plain(); }));
      save.push_back(timed([&] { save_peak = std::max(save_peak, peak_of([&] { save_set(); })); }));
      drop();
      plain_read.push_back(timed([&] { read_plain(); }));
      load.push_back(timed([&] { load_peak = std::max(load_peak, peak_of([&] { load_set(); })); }));
      for (int i = 0; i < 5; ++i) step.push_back(timed([&] { train(); }));
      train_while_saving(busy_step, stood);
    }
    double export_peak = 0, export_time = 0;
    agree(ranks_.comm, [&] {
      if (!ranks_.leads()) return;
      const auto begin = Clock::now();
      export_peak = peak_of([&] {
        CheckpointReader reader = CheckpointReader::open(folder_);
        export_gpt2(folder_ / "hf", reader, model_->config(), {}, {});
      });
      export_time = std::chrono::duration<double>(Clock::now() - begin).count();
    });
    const double bytes = static_cast<double>(bytes_) / 1e6;
    const double ranks_here =
        std::string(ranks_.comm.transport()).starts_with("thread") ? ranks_.comm.size() : 1;
    constexpr double kMiB = 1 << 20;
    const std::vector<BenchRow> rows{
        {"save", "MB/s", bytes / median(save), bytes / median(plain_write), "plain write", 0.8},
        {"load", "MB/s", bytes / median(load), bytes / median(plain_read), "plain read", 0.8},
        {"export of masters", "MB/s", bytes / 3 / export_time, 0, "", 0},
        {"step while a save is written", "ms", 1e3 * median(busy_step), 1e3 * median(step),
         "without", 1.1, true},
        {"training stood still", "ms", 1e3 * median(stood), 0, "", 0},
        {"memory of save", "MiB", save_peak / kMiB, 4 * ranks_here, "bound", 1, true},
        {"memory of load", "MiB", load_peak / kMiB, 4 * ranks_here, "bound", 1, true},
        {"memory of export", "MiB", export_peak / kMiB, 3 * kTransposeBytes / kMiB, "bound", 1,
         true},
        {"snapshot of a rank", "MiB", static_cast<double>(copy_->bytes()) / kMiB,
         static_cast<double>(bytes_) / ranks_.comm.size() / kMiB, "its shard", 0},
    };
    if (ranks_.leads()) {
      print_rows(fmt::format("checkpoint: {} parameters, {:.0f} MB in a set, {} ranks over {}, {}",
                             count_text(static_cast<double>(model_->parameter_count())), bytes,
                             ranks_.comm.size(), device_.comm().transport(), folder_.string()),
                 rows, config_.json());
    }
    return 0;
  }

 private:
  // Some 25 million parameters and short steps, unless told otherwise.
  static Config with_shape(const Config& given) {
    Config config = with_defaults(given);
    if (given.has_model()) return config;
    if (!given.has_layers()) config.set_layers(8);
    if (!given.has_heads()) config.set_heads(8);
    if (!given.has_channels()) config.set_channels(512);
    if (!given.has_zero()) config.set_zero(3);
    return config;
  }

  void set_up() {
    model_ = std::make_unique<Gpt>(gpt_config(config_, 256));
    if (!config_.has_global_batch()) config_.set_global_batch(8);
    const BatchPlan batch = resolve_batch(config_, ranks_.comm.size());
    policy_ = scaler_policy(config_);
    options_ = step_options(config_, batch, ranks_.comm.size(), device_.comm().transport(),
                            model_->config().context);
    leaves_ = std::make_unique<DrawnLeaves>(model_->vocabulary());
    bytes_ = set_bytes(*model_, options_);
    // The same name on every rank: of the launched job, where a folder was not given.
    folder_ = fs::path(config_.has_out() ? config_.out() : ".") / "bench-checkpoint";
    if (ranks_.leads()) {
      std::error_code error;
      if (fs::exists(folder_, error)) {
        throw CannotCreateError("{}: is there already, wanted a new folder", folder_.string());
      }
      fs::create_directories(folder_, error);
      if (error) throw CannotCreateError("{}: {}", folder_.string(), error.message());
    }
  }

  // Seconds of the slowest rank.
  double timed(FunctionRef<void()> call) {
    ranks_.comm.barrier();
    const auto begin = Clock::now();
    call();
    ranks_.comm.barrier();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void train(bool quiet = false) {
    writers_quiet_ = (*step_)(done_++, 1e-4, *leaves_, false, quiet).decision.writers_quiet;
  }

  fs::path plain_path() const { return folder_ / fmt::format("plain.{}", ranks_.comm.rank()); }

  void write_plain() {
    remove_tree(plain_path());
    const std::vector<std::byte> block(kPlainBlock, std::byte{0x5a});
    OutputFile file = OutputFile::create(plain_path());
    for (int64_t left = share(); left > 0; left -= static_cast<int64_t>(kPlainBlock)) {
      file.write(std::span(block).first(
          static_cast<size_t>(std::min<int64_t>(left, static_cast<int64_t>(kPlainBlock)))));
    }
    file.finish();
  }

  void read_plain() {
    std::vector<std::byte> block(kPlainBlock);
    const InputFile file = InputFile::open(plain_path());
    for (int64_t at = 0; at < file.bytes(); at += static_cast<int64_t>(kPlainBlock)) {
      file.read(at, std::span(block).first(static_cast<size_t>(
                        std::min<int64_t>(file.bytes() - at, static_cast<int64_t>(kPlainBlock)))));
    }
  }

  int64_t share() const { return bytes_ / ranks_.comm.size(); }

  CheckpointState state() const {
    CheckpointState state = state_of(*step_, 1);
    state.config_text = to_textproto(config_);
    return state;
  }

  void save_set() {
    StreamSource source(device_.stream());
    save_checkpoint(folder_, state(), pieces_of(*step_), ranks_.comm, {&source, nullptr, {}});
  }

  void load_set() {
    CheckpointReader reader = CheckpointReader::open(folder_);
    restore(*step_, reader);
  }

  void drop() {
    ranks_.comm.barrier();
    drop_from_cache(plain_path());
    if (ranks_.leads()) {
      for (const auto& file : fs::directory_iterator(folder_ / "checkpoints" / "step-00000001")) {
        drop_from_cache(file.path());
      }
    }
    ranks_.comm.barrier();
  }

  void train_while_saving(std::vector<double>& steps, std::vector<double>& stood) {
    std::optional<BackgroundSave> save;
    double still = timed([&] {
      save.emplace(folder_, state(), copy_->take(*step_, device_.stream()), ranks_.comm);
    });
    for (bool through = false; !through;) {
      const double spent = timed([&] { train(save->quiet()); });
      if (!writers_quiet_) {
        steps.push_back(spent);  // it was in flight all the time
        continue;
      }
      if (steps.empty()) steps.push_back(spent);
      still += timed([&] { through = save->advance(); });
    }
    stood.push_back(still);
  }

  Config config_;
  RankContext& ranks_;
  RankDevice device_;
  std::unique_ptr<Gpt> model_;
  StepOptions options_;
  std::string policy_;
  std::unique_ptr<DrawnLeaves> leaves_;
  std::unique_ptr<TrainStep> step_;
  std::optional<StateCopy> copy_;
  fs::path folder_;
  int64_t bytes_ = 0, done_ = 0;
  bool writers_quiet_ = false;
};

}  // namespace

int bench_checkpoint(const Config& config, RankContext& ranks) {
  return CheckpointBench(config, ranks).run();
}

}  // namespace shardrun
