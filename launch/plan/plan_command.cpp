// `shardrun plan`: what one rank of a job will hold, compute and send, for any world size, stage and
// model, on this machine alone. The step runs on the device kind meta; what it records is the plan that
// the job itself replays.
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "launch/commands.h"
#include "launch/data/tokenizer.h"
#include "launch/train/job.h"
#include "launch/train/saver.h"
#include "sharding/timeline.h"

namespace shardrun {
namespace {

constexpr std::string_view kHiddenFlags[] = {"Optimizer", "Trying out", "Generation"};

class NoLeaves : public LeafSource {  // meta never asks
  void training_leaf(int64_t, int64_t, Tensor, Tensor) override {}
  void evaluation_leaf(int64_t, Tensor, Tensor) override {}
};

// Of a data-centre GPU of the day and its neighbours in the node, as reached by the step's kernels:
// assumed, to compare plans with each other, not to time a job.
Speeds typical_gpu(Precision precision) {
  return {.flops = compute_dtype(precision) == Dtype::fp32 ? 4e13 : 4e14,
          .memory_bytes = 2.5e12,
          .link_bytes = 1.5e11,
          .call_seconds = 2e-5};
}

std::map<std::string, size_t> by_label(const std::vector<MemoryPlan::Block>& blocks) {
  std::map<std::string, size_t> sums;
  for (const MemoryPlan::Block& block : blocks) sums[block.label] += block.bytes;
  return sums;
}

// Of a GPU's tensors as RankDevice chooses it, where NCCL is in the build; of the CPU's mpi.
std::string transport_of(const Config& config, int world) {
  const std::string& comm = config.comm();
  if (comm == "nccl" || comm == "staged") return comm;
  if (!parse_device(config.device()).cuda) return "mpi";
  return comm == "auto" && world > 1 ? "nccl" : "staged";
}

}  // namespace

int run_plan(const std::vector<std::string>& words) {
  const CommandLine line = parse_command_line(words);
  if (line.help) {
    std::printf("shardrun plan: memory, FLOPs and traffic of a rank\n\n%s",
                flags_help(kHiddenFlags).c_str());
    return 0;
  }
  if (!line.operands.empty()) {
    throw UsageError("plan: got '{}', wanted flags or one CONFIG.textproto", line.operands[0]);
  }
  const Config config = with_defaults(line.config);
  const int world = config.has_world_size() ? static_cast<int>(config.world_size()) : 1;
  const GptConfig gpt = gpt_config(config, make_tokenizer(config.tokenizer())->vocabulary());
  const Gpt model(gpt);
  const BatchPlan batch = resolve_batch(config, world);
  const std::string transport = transport_of(config, world);
  const StepOptions options = step_options(config, batch, world, transport, gpt.context);

  ThreadPool pool(1);
  Stream stream(DeviceKind::meta, detect_isa(), &pool);
  RecordingMemory recorder;
  const bool on_gpu = transport != "mpi";
  const size_t workspace = on_gpu ? static_cast<size_t>(config.workspace()) : 0;
  const auto comm = make_meta_communicator(0, world, transport);
  NoLeaves leaves;
  TrainStep step(model, options, scaler_policy(config), *comm, recorder, stream);
  RecordingMemory pinned_copy;
  std::optional<StateCopy> copy;
  if (saves_beside_training(config)) {
    copy.emplace(step, on_gpu ? pinned_copy : recorder, nullptr);
  }
  const size_t pinned =
      (transport == "staged" ? staged_host_bytes(world) : 0) + (on_gpu && copy ? copy->bytes() : 0);
  step.initialize();
  const Speeds speeds = typical_gpu(options.shard.precision);
  Timeline timeline(stream, *comm, speeds);
  step.runner().set_watch(&timeline);
  const WorkCount before = stream.work();
  const Traffic traffic_before = comm->traffic();
  step(0, 1e-3, leaves);
  const double flops = stream.work().flops - before.flops;
  const double sent = comm->traffic().sent_bytes - traffic_before.sent_bytes;
  const double seconds = timeline.seconds(), exposed = timeline.exposed_seconds(),
               communication = timeline.communication_seconds();
  const MemoryPlan plan = recorder.plan();

  if (config.json()) {
    nlohmann::ordered_json json{{"model", config.model()},
                                {"parameters", model.parameter_count()},
                                {"world_size", world},
                                {"zero", config.zero()},
                                {"precision", config.precision()},
                                {"prefetch", options.prefetch},
                                {"arena_bytes", plan.arena_bytes()},
                                {"persistent_bytes", plan.persistent_bytes},
                                {"workspace_bytes", workspace},
                                {"pinned_bytes", pinned},
                                {"persistent", by_label(plan.persistent)},
                                {"flops_per_step", flops},
                                {"sent_bytes_per_step", sent}};
    if (on_gpu) {
      json["timeline"] = {{"assumed",
                           {{"flops_per_s", speeds.flops},
                            {"memory_bytes_per_s", speeds.memory_bytes},
                            {"link_bytes_per_s", speeds.link_bytes},
                            {"call_s", speeds.call_seconds}}},
                          {"step_ms", seconds * 1e3},
                          {"communication_ms", communication * 1e3},
                          {"comm_exposed_ms", exposed * 1e3}};
    }
    for (const MemoryPlan::Program& program : plan.programs) {
      json["programs"][program.name] = {{"arena_bytes", program.arena_bytes},
                                        {"lower_bound_bytes", program.peak_bytes},
                                        {"allocations", program.blocks.size()}};
    }
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  std::printf("%s, %s parameters, %d rank%s, zero %d, %s\n", config.model().c_str(),
              count_text(static_cast<double>(model.parameter_count())).c_str(), world,
              world == 1 ? "" : "s", static_cast<int>(config.zero()), config.precision().c_str());
  std::printf("memory of a rank: %s\n  kept: %s\n",
              bytes_text(static_cast<double>(plan.arena_bytes())).c_str(),
              bytes_text(static_cast<double>(plan.persistent_bytes)).c_str());
  for (const auto& [label, bytes] : by_label(plan.persistent)) {
    std::printf("    %-22s %s\n", label.c_str(), bytes_text(static_cast<double>(bytes)).c_str());
  }
  for (const MemoryPlan::Program& program : plan.programs) {
    std::printf("  %-12s %s, %.1f %% above what is alive at once\n", program.name.c_str(),
                bytes_text(static_cast<double>(program.arena_bytes)).c_str(),
                program.peak_bytes ? 100.0 * (static_cast<double>(program.arena_bytes) /
                                                  static_cast<double>(program.peak_bytes) -
                                              1.0)
                                   : 0.0);
  }
  if (on_gpu) {
    std::printf("  beside it    %s of workspace (--workspace), %s of pinned host memory\n",
                bytes_text(static_cast<double>(workspace)).c_str(),
                bytes_text(static_cast<double>(pinned)).c_str());
    std::printf("fits a GPU with %s free, beside what its driver%s\n",
                bytes_text(static_cast<double>(plan.arena_bytes() + workspace)).c_str(),
                transport == "nccl" ? " and NCCL take" : " takes");
  }
  std::printf("a step of this rank: %lld micro-step%s, %sFLOP, %s sent\n",
              static_cast<long long>(batch.micro_steps), batch.micro_steps == 1 ? "" : "s",
              count_text(flops).c_str(), bytes_text(sent).c_str());
  if (on_gpu) {
    std::printf("  where a GPU does %sFLOP/s and moves %s/s, a link %s/s: %.1f ms, of them %.1f ms "
                "communication that nothing hides, of %.1f ms; prefetch %d\n",
                count_text(speeds.flops).c_str(), bytes_text(speeds.memory_bytes).c_str(),
                bytes_text(speeds.link_bytes).c_str(), seconds * 1e3, exposed * 1e3,
                communication * 1e3, options.prefetch);
  }
  return 0;
}

}  // namespace shardrun
