// Checks that need more than one field, or more than its range.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <vector>

#include "launch/config/fields.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

void check_policy(const std::string& policy) {
  static const std::vector<std::string> known{"default", "torch", "deepspeed", "megatron",
                                              "keras",   "apex",  "static"};
  if (std::find(known.begin(), known.end(), policy) != known.end()) return;
  if (policy.starts_with("static:")) {
    const auto scale = parse_number<double>(policy.substr(7));
    if (scale && *scale > 0 && std::isfinite(*scale)) return;
    throw UsageError("--loss-scale-policy: got {}, wanted static:S with a number S > 0", policy);
  }
  throw UsageError("--loss-scale-policy: got {}, wanted one of {} or static:S (the nearest is {})",
                   policy, fmt::join(known, ", "), nearest_name(policy, known));
}

void check_comm(const Config& config) {
  static const std::vector<std::string> known{"auto", "thread:N", "mpi", "nccl", "staged", "shm"};
  const std::string& comm = config.comm();
  for (const char* name : {"auto", "mpi", "nccl", "staged", "shm"}) {
    if (comm == name) return;
  }
  if (comm.starts_with("thread:")) {
    const auto ranks = parse_number<int64_t>(comm.substr(7));
    if (ranks && *ranks >= 1 && *ranks <= 4096) return;
    throw UsageError("--comm: got {}, wanted thread:N with 1 <= N <= 4096", comm);
  }
  throw UsageError("--comm: got {}, wanted one of {} (the nearest is {})", comm,
                   fmt::join(known, ", "), nearest_name(comm, known));
}

}  // namespace

int64_t parse_duration(const std::string& text) {
  std::vector<int64_t> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ':');) {
    const auto number = parse_number<int64_t>(part);
    const bool digits = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    const bool fits = number && (parts.empty() ? *number < 1'000'000'000 : *number < 60);
    if (!digits || !fits || parts.size() == 3)
      parts.assign(4, 0);
    else
      parts.push_back(*number);
  }
  if (parts.empty() || parts.size() > 3 || text.ends_with(':')) {
    throw UsageError("--max-time: got {}, wanted HH:MM:SS", text);
  }
  int64_t seconds = 0;
  for (int64_t part : parts) seconds = seconds * 60 + part;
  return seconds;
}

DeviceChoice parse_device(const std::string& text) {
  if (text == "auto") return {.automatic = true};
  if (text == "cpu") return {};
  if (text == "cuda") return {.cuda = true};
  if (text.starts_with("cuda:")) {
    const auto index = parse_number<int64_t>(text.substr(5));
    if (index && *index >= 0 && *index < 1024) {
      return {.cuda = true, .index = static_cast<int>(*index)};
    }
  }
  throw UsageError("--device: got {}, wanted auto, cpu, cuda or cuda:N", text);
}

void validate(const Config& config) {
  parse_device(config.device());
  check_comm(config);
  const std::string& tokenizer = config.tokenizer();
  if (tokenizer.starts_with("sp:") || tokenizer.starts_with("hf:")) {
    throw UsageError("--tokenizer: got {}; reading these is not built yet, wanted byte or gpt2:DIR",
                     tokenizer);
  }
  if (tokenizer != "byte" && !(tokenizer.starts_with("gpt2:") && tokenizer.size() > 5)) {
    throw UsageError("--tokenizer: got {}, wanted byte or gpt2:DIR", tokenizer);
  }
  if (config.has_max_time()) parse_duration(config.max_time());
  if (config.has_loss_scale_policy()) check_policy(config.loss_scale_policy());
  if (config.loss_scale_policy() == "static" && !config.has_loss_scale()) {
    throw UsageError(
        "--loss-scale-policy: got static without a scale, wanted static:S or --loss-scale S");
  }
  if (config.has_loss_scale() && config.has_loss_scale_policy() &&
      config.loss_scale_policy() != "static") {
    throw UsageError("--loss-scale: got {} beside --loss-scale-policy {}, wanted one of the two",
                     config.loss_scale(), config.loss_scale_policy());
  }
  if (config.recompute() != "none" && config.recompute() != "unit") {
    const auto every = parse_number<int64_t>(config.recompute());
    if (!every || *every < 1) {
      throw UsageError("--recompute: got {}, wanted none, unit or a whole number >= 1",
                       config.recompute());
    }
  }
  if (config.has_min_lr() && config.min_lr() > config.lr()) {
    throw UsageError("--min-lr: got {}, wanted at most --lr, which is {}", config.min_lr(),
                     config.lr());
  }
  if (config.has_global_batch() && config.has_micro_batch() &&
      config.global_batch() % config.micro_batch() != 0) {
    throw ConfigError(
        "--global-batch: got {}, wanted a multiple of --micro-batch: {} = {} x {} + {}",
        config.global_batch(), config.global_batch(), config.global_batch() / config.micro_batch(),
        config.micro_batch(), config.global_batch() % config.micro_batch());
  }
}

BatchPlan resolve_batch(const Config& config, int64_t world) {
  SHARDRUN_CHECK(world >= 1, "world is {}", world);
  constexpr int64_t kLeaves = 8;
  BatchPlan plan;
  plan.micro_batch = config.has_micro_batch() ? config.micro_batch() : 8;
  if (!config.has_micro_batch() && config.has_global_batch()) {
    while (config.global_batch() % plan.micro_batch != 0) --plan.micro_batch;
  }
  if (config.has_global_batch()) {
    plan.global_batch = config.global_batch();
  } else {
    const __int128 product =
        static_cast<__int128>(plan.micro_batch) *
        (config.has_grad_accum() ? static_cast<__int128>(config.grad_accum()) * world : kLeaves);
    if (product > INT64_MAX) throw ConfigError("--micro-batch: the global batch overflows");
    plan.global_batch = static_cast<int64_t>(product);
  }
  if (plan.global_batch % plan.micro_batch != 0) {
    throw ConfigError("--global-batch: got {}, wanted a multiple of --micro-batch {}",
                      plan.global_batch, plan.micro_batch);
  }
  plan.leaves = plan.global_batch / plan.micro_batch;
  plan.micro_steps = (plan.leaves + world - 1) / world;
  if (config.has_grad_accum() && config.grad_accum() != plan.micro_steps) {
    throw ConfigError(
        "--grad-accum: got micro-batch {} x grad-accum {} x {} ranks = {}, wanted global-batch {}: "
        "grad-accum {}, or leave it out",
        plan.micro_batch, config.grad_accum(), world,
        plan.micro_batch * config.grad_accum() * world, plan.global_batch, plan.micro_steps);
  }
  return plan;
}

}  // namespace shardrun
