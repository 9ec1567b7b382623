// `shardrun bench step`: training steps of a model on drawn tokens, as `train` would take them with the
// same flags, and what they are made of; the model's arithmetic beside a square matrix product.
//
// Parts come from differences: a step of M micro-steps and one of another number tell what one more
// costs and what is left, which is the decision and the update.
#include <algorithm>
#include <chrono>

#include "launch/bench/timing.h"
#include "launch/train/job.h"

namespace shardrun {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmups = 2;
constexpr double kSeconds = 8;  // for the steps that are timed; at least 3, at most 20

class DrawnLeaves : public LeafSource {
 public:
  explicit DrawnLeaves(int64_t vocabulary) : vocabulary_(static_cast<uint64_t>(vocabulary)) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    const uint64_t place = mix64(static_cast<uint64_t>(step), static_cast<uint64_t>(leaf));
    for (int64_t i = 0; i < tokens.numel(); ++i) {
      const auto draw = static_cast<int32_t>(mix64(place, static_cast<uint64_t>(i)) % vocabulary_);
      tokens.as<int32_t>()[i] = draw;
      targets.as<int32_t>()[tokens.numel() - 1 - i] = draw;
    }
  }
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override {
    training_leaf(-1, leaf, tokens, targets);
  }

 private:
  uint64_t vocabulary_;
};

struct Times {
  double step = 0, forward = 0;  // seconds; forward: of one leaf
  size_t bytes = 0;              // of the rank's arena
  std::string transport;
};

// One job of `micro_steps` rounds of leaves, set up, timed and gone.
Times time_job(const Config& config, const Gpt& model, const BatchPlan& batch, RankContext& ranks) {
  RankDevice device(config, ranks);
  const StepOptions options = step_options(config, batch, ranks.comm.size(),
                                           device.comm().transport(), model.config().context);
  agree(ranks.comm, [&] { device.require(options.shard.precision); });
  const std::string policy = scaler_policy(config);
  DrawnLeaves leaves(model.vocabulary());
  agree(ranks.comm, [&] {
    device.plan_memory(
        ranks, options.micro_batch,
        [&](int64_t micro_batch, Communicator& comm, Memory& memory, Stream& stream) {
          StepOptions rehearsed = options;
          rehearsed.micro_batch = micro_batch;
          rehearsed.global_batch = micro_batch * batch.leaves;
          TrainStep step(model, rehearsed, policy, comm, memory, stream);
          step.initialize();
          step(0, config.lr(), leaves);
          step.evaluate(1, leaves);
        });
  });
  TrainStep step(model, options, policy, device.comm(), device.memory(), device.stream());
  step.initialize();
  int64_t done = 0;
  const auto timed = [&](FunctionRef<void()> call) {
    for (int i = 0; i < kWarmups; ++i) call();
    std::vector<double> times;
    double sum = 0;
    const auto goes_on = [&] {
      int64_t more = times.size() < 3 || (times.size() < 20 && sum < kSeconds);
      if (!ranks.leads()) more = 0;
      ranks.comm.all_reduce_sum({&more, 1});  // all ranks as the first says
      return more > 0;
    };
    while (goes_on()) {
      const auto begin = Clock::now();
      call();
      times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      sum += times.back();
    }
    return median(std::move(times));
  };
  Times out;
  out.step = timed([&] { step(done++, config.lr(), leaves); });
  const int64_t world = ranks.comm.size();
  out.forward = timed([&] { step.evaluate(world, leaves); });
  out.bytes = device.plan().arena_bytes();
  out.transport = device.comm().transport();
  return out;
}

BatchPlan with_micro_steps(const BatchPlan& batch, int64_t micro_steps, int64_t world) {
  BatchPlan out = batch;
  out.micro_steps = micro_steps;
  out.leaves = micro_steps * world;
  out.global_batch = out.leaves * batch.micro_batch;
  return out;
}

}  // namespace

int bench_step(const Config& given, RankContext& ranks) {
  Config config = with_defaults(given);
  std::unique_ptr<Gpt> model;
  BatchPlan batch;
  const int world = ranks.comm.size();
  agree(ranks.comm, [&] {
    model = std::make_unique<Gpt>(gpt_config(config, config.has_vocab() ? config.vocab() : 256));
    batch = resolve_batch(config, world);
    scaler_policy(config);
  });
  const Times whole = time_job(config, *model, batch, ranks);
  const int64_t others = batch.micro_steps > 1 ? 1 : 3;
  const BatchPlan other_batch = with_micro_steps(batch, others, world);
  const Times other = time_job(config, *model, other_batch, ranks);
  // What else the machine does may outweigh a small part.
  const double micro_step =
      std::max(0.0, (whole.step - other.step) / static_cast<double>(batch.micro_steps - others));
  const double rest =
      std::max(0.0, whole.step - micro_step * static_cast<double>(batch.micro_steps));

  // All ranks multiply at once, as they do in a step.
  RankDevice device(config, ranks);
  const auto memory = make_heap_memory(device.stream().device());
  const GptConfig& gpt = model->config();
  const Precision precision = precision_from_name(config.precision());
  const Peak peak = matmul_peak(2.0 * static_cast<double>(batch.micro_batch * gpt.context) *
                                    static_cast<double>(gpt.padded_vocabulary() * gpt.channels),
                                compute_dtype(precision), *memory, device.stream());
  device.stream().synchronize();
  ranks.comm.barrier();
  if (!ranks.leads()) return 0;

  const double tokens = static_cast<double>(batch.global_batch * gpt.context) / whole.step;
  const std::vector<BenchRow> rows{
      {"step", "ms", 1e3 * whole.step, 0, "", 0},
      {"tokens", "per s", tokens, 0, "", 0},
      {"model arithmetic of a rank", "GFLOP/s", tokens * flops_per_token(gpt) / world / 1e9,
       peak.flops_per_second / 1e9, fmt::format("{}^3", peak.size), 0},
      {"micro-step", "ms", 1e3 * micro_step, 1e3 * whole.step, "step", 0},
      {"forward of a leaf", "ms", 1e3 * whole.forward, 1e3 * micro_step, "micro-step", 0},
      {"decision and update", "ms", 1e3 * rest, 1e3 * whole.step, "step", 0},
      {"memory of a rank", "MiB", static_cast<double>(whole.bytes) / (1 << 20), 0, "", 0},
  };
  print_rows(fmt::format("step: {}, zero {}, {}, {} x {} sequences of {}, {} rank{} over {}, {}",
                         config.model(), config.zero(), config.precision(), batch.leaves,
                         batch.micro_batch, gpt.context, world, world == 1 ? "" : "s",
                         whole.transport, device.name()),
             rows, config.json());
  return 0;
}

}  // namespace shardrun
