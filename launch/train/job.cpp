#include "launch/train/job.h"

#include <cctype>
#include <cstdlib>
#include <fstream>

#include "kernels/matmul.h"
#include "launch/train/rank_device.h"
#include "models/presets.h"

namespace shardrun {

GptConfig gpt_config(const Config& config, int64_t vocabulary) {
  const bool nano = config.model() == "gpt-nano";
  GptConfig gpt = preset(config.model(), nano ? vocabulary : 0);
  if (config.has_vocab()) gpt.vocabulary = config.vocab();
  if (config.has_layers()) gpt.layers = config.layers();
  if (config.has_heads()) gpt.heads = config.heads();
  if (config.has_channels()) gpt.channels = config.channels();
  if (config.has_dropout()) gpt.dropout = static_cast<float>(config.dropout());
  if (config.has_bias()) gpt.bias = config.bias();
  if (config.has_seq_len()) gpt.context = config.seq_len();
  if (gpt.channels % gpt.heads != 0) {
    throw ConfigError("--channels {} is not a multiple of --heads {}", gpt.channels, gpt.heads);
  }
  if (gpt.vocabulary < vocabulary) {
    throw ConfigError("--vocab: the model has {} tokens, the tokenizer {}", gpt.vocabulary,
                      vocabulary);
  }
  return gpt;
}

static Dtype wire_dtype(const Config& config, Precision precision) {
  if (!config.has_reduce_dtype()) {
    return precision == Precision::bf16_true ? Dtype::bf16 : Dtype::fp32;
  }
  const std::string& name = config.reduce_dtype();
  const Dtype wire = name == "bf16" ? Dtype::bf16 : name == "fp16" ? Dtype::fp16 : Dtype::fp32;
  const Dtype compute = compute_dtype(precision);
  if (wire != Dtype::fp32 && wire != compute) {
    throw ConfigError("--reduce-dtype {}: with --precision {} wanted fp32 or {}", name,
                      name_of(precision), name_of(compute));
  }
  return wire;
}

static int recompute_every(const Config& config) {
  const std::string& which = config.recompute();
  if (which == "none") return 0;
  if (which == "unit") return 1;
  char* end = nullptr;
  const long k = std::strtol(which.c_str(), &end, 10);
  if (end == which.c_str() || *end != '\0' || k < 1) {
    throw UsageError("--recompute: got '{}', wanted none, unit, or a number >= 1", which);
  }
  return static_cast<int>(k);
}

int prefetch_units(const Config& config, const std::string& transport) {
  if (config.has_prefetch()) return static_cast<int>(config.prefetch());
  return transport == "nccl" ? 1 : 0;
}

StepOptions step_options(const Config& config, const BatchPlan& batch, int world_size,
                         const std::string& transport, int64_t seq_len) {
  StepOptions options;
  options.shard.world_size = world_size;
  options.shard.zero = static_cast<int>(config.zero());
  options.shard.precision = precision_from_name(config.precision());
  options.shard.wire = wire_dtype(config, options.shard.precision);
  options.shard.sum_block = config.sum_block();
  options.shard.reduction =
      config.reduction() == "native" ? Reduction::native : Reduction::exact;
  options.shard.reduce_every =
      config.reduce_every() == "step" ? ReduceEvery::step : ReduceEvery::micro_step;
  options.update.beta1 = config.beta1();
  options.update.beta2 = config.beta2();
  options.update.eps = config.eps();
  options.update.weight_decay = config.weight_decay();
  options.update.grad_clip = config.grad_clip();
  options.seed = static_cast<uint64_t>(config.seed());
  options.micro_batch = batch.micro_batch;
  options.global_batch = batch.global_batch;
  options.seq_len = seq_len;
  options.recompute_every = recompute_every(config);
  options.prefetch = prefetch_units(config, transport);
  return options;
}

std::string scaler_policy(const Config& config) {
  if (config.precision() != "fp16") {
    if (config.has_loss_scale() || config.has_loss_scale_policy()) {
      throw ConfigError("--loss-scale: --precision {} needs no loss scale; it belongs to fp16",
                        config.precision());
    }
    return "none";
  }
  if (config.has_loss_scale()) return fmt::format("static:{}", config.loss_scale());
  return config.has_loss_scale_policy() ? config.loss_scale_policy() : "default";
}

static std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  std::string line, family, model;
  while (std::getline(file, line) && (family.empty() || model.empty())) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.rfind("cpu family", 0) == 0) family = line.substr(colon + 2);
    if (line.rfind("model\t", 0) == 0) model = line.substr(colon + 2);
  }
  return "cpu-" + family + "-" + model;
}

// The library's choice among its kernels hangs on the scratch memory that they may have.
static std::string device_key(const Config& config, RankDevice& device) {
  if (!device.gpu()) {
    return fmt::format("isa={} processor={} library={}", name_of(device.stream().isa()),
                       processor(), kernels::matmul_library());
  }
  const DeviceInfo& info = device.gpu()->info();
  return fmt::format("gpu={} arch=sm_{}{} workspace={} library={}", info.name, info.major,
                     info.minor, config.workspace(), kernels::matmul_library(DeviceKind::cuda));
}

// Native sums have the bits of one number of ranks and one transport.
static std::string reduction_key(const StepOptions& options, const RankDevice& device) {
  if (options.shard.reduction == Reduction::exact) return "exact";
  return fmt::format("native-{}-{}", device.comm().transport(), options.shard.world_size);
}

std::string numerics_key(const Config& config, const StepOptions& options, RankDevice& device) {
  return fmt::format(
      "micro-batch={} global-batch={} precision={} reduce-dtype={} sum-block={} "
      "reduction={} {}",
      options.micro_batch, options.global_batch, config.precision(), name_of(options.shard.wire),
      options.shard.sum_block, reduction_key(options, device), device_key(config, device));
}

std::string decay_text(const Model& model) {
  int64_t tensors[2] = {}, elements[2] = {};
  for (const Unit* unit : model.units()) {
    for (const ParameterSpec& spec : unit->parameters()) {
      ++tensors[is_decayed(spec)];
      elements[is_decayed(spec)] += spec.shape.numel();
    }
  }
  return fmt::format("decayed parameters: {} tensors, {} elements; not decayed: {} tensors, {} elements",
                     tensors[1], elements[1], tensors[0], elements[0]);
}

static std::string scaled(double value, double step, std::initializer_list<const char*> units) {
  auto unit = units.begin();
  while (value >= step && unit + 1 != units.end()) {
    value /= step;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, unit == units.begin() ? 0 : 1, *unit);
}

std::string bytes_text(double bytes) {
  return scaled(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB"});
}

std::string count_text(double count) { return scaled(count, 1000, {"", "K", "M", "G", "T"}); }

}  // namespace shardrun
