#include "launch/smoke/smoke.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>

#include "launch/commands.h"
#include "launch/train/job.h"
#include "launch/train/rank_device.h"
#include "models/gpt.h"
#include "sharding/checkpoint/hash.h"
#include "sharding/snapshot.h"

namespace shardrun {
namespace {

constexpr int64_t kSteps = 20, kLeaves = 4, kMicroBatch = 1;

GptConfig tiny_gpt() {
  GptConfig gpt;
  gpt.layers = 2;
  gpt.heads = 2;
  gpt.channels = 32;
  gpt.context = 16;
  gpt.vocabulary = 50;
  gpt.bias = true;
  gpt.dropout = 0.05f;
  return gpt;
}

// Every sequence counts on by its own stride: learnt within a few steps, different in every leaf.
class CountingLeaves : public LeafSource {
 public:
  explicit CountingLeaves(int64_t vocabulary) : vocabulary_(vocabulary) {}
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    const int64_t rows = tokens.shape()[0], length = tokens.shape()[1];
    for (int64_t row = 0; row < rows; ++row) {
      const uint64_t draw = mix64(static_cast<uint64_t>((step * kLeaves + leaf) * rows + row));
      const int64_t start = static_cast<int64_t>(draw % vocabulary_), stride = 1 + draw / 64 % 3;
      for (int64_t t = 0; t < length; ++t) {
        const int64_t i = row * length + t;
        tokens.as<int32_t>()[i] = static_cast<int32_t>((start + t * stride) % vocabulary_);
        targets.as<int32_t>()[i] = static_cast<int32_t>((start + (t + 1) * stride) % vocabulary_);
      }
    }
  }
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override {
    training_leaf(-1, leaf, tokens, targets);
  }

 private:
  int64_t vocabulary_;
};

// Fingerprints of leaf gradients, by (step, leaf, unit): what tells a wrong rank from a wrong sum.
using Fingerprints = std::map<std::tuple<int64_t, int64_t, int>, uint64_t>;

struct Watch {
  int rank = 0;
  int64_t step = 0;
  SmokeFault fault = nullptr;
  Stream* stream = nullptr;
  Fingerprints seen;
};

// A fingerprint takes only what exists in model space: padding depends on the world size.
void watch_gradient(void* context, int64_t leaf, const Unit& unit, Tensor gradient) {
  Watch& watch = *static_cast<Watch*>(context);
  if (watch.fault) {
    const HostView before(gradient, *watch.stream);
    const Tensor host(const_cast<std::byte*>(before.data()), gradient.dtype(), gradient.shape());
    watch.fault(watch.rank, watch.step, leaf, unit, host);
    if (watch.stream->device()) {
      copy_from_host(gradient, host.data(), *watch.stream);
      watch.stream->synchronize();
    }
  }
  int64_t used = 0;
  for (const ParameterSpec& spec : unit.parameters()) {
    used += (spec.padded_shape().numel() + kBlock - 1) / kBlock * kBlock;
  }
  used = std::min(used, gradient.numel());
  const HostView view(gradient, *watch.stream);
  watch.seen[{watch.step, leaf, unit.index()}] =
      hash64({view.data(), static_cast<size_t>(used) * 4});
}

struct Run {
  double first_loss = 0, last_loss = 0;
  std::string hash;
  std::map<std::string, std::vector<int64_t>> tensors;
  Fingerprints gradients;
};

// Parameters and moments in model space, on every rank: slices are disjoint, so a sum of integers with
// zeros elsewhere puts them together.
void collect(TrainStep& step, Communicator& comm, Stream& stream, Run& run) {
  for (UnitState& unit : step.state().units()) {
    for (const ParameterPlace& place : unit.plan->places) {
      for (const char* kind : {"master", "moment1", "moment2"}) {
        run.tensors[place.spec->name + " " + kind].assign(place.numel, 0);
      }
    }
  }
  for (const CheckpointPiece& piece : pieces_of(step)) {
    std::vector<int64_t>& bits = run.tensors[piece.name + " " + name_of(piece.kind)];
    const size_t size = size_of(piece.data.dtype());
    const HostView data(piece.data, stream);
    for (int64_t i = 0; i < piece.data.numel(); ++i) {
      std::memcpy(&bits[piece.begin + i], data.data() + i * size, size);
    }
  }
  Hash128 hash;
  for (auto& [name, bits] : run.tensors) {
    comm.all_reduce_sum(bits);
    hash.add(name);
    hash.add(std::as_bytes(std::span(bits)));
  }
  run.hash = hash.digest().hex();
}

Run train(const Config& config, RankContext& ranks, const std::string& precision, int zero,
          SmokeFault fault) {
  const Gpt model(tiny_gpt());
  StepOptions options;
  options.shard.world_size = ranks.comm.size();
  options.shard.zero = zero;
  options.shard.precision = precision_from_name(precision);
  options.micro_batch = kMicroBatch;
  options.global_batch = kMicroBatch * kLeaves;
  options.seq_len = tiny_gpt().context;
  const std::string policy = precision == "fp16" ? "default" : "none";
  CountingLeaves leaves(tiny_gpt().vocabulary);
  RankDevice device(config, ranks);
  options.prefetch = prefetch_units(config, device.comm().transport());
  const auto rehearsal = [&](int64_t, Communicator& comm, Memory& memory, Stream& stream) {
    TrainStep rehearsed(model, options, policy, comm, memory, stream);
    rehearsed.initialize();
    rehearsed(0, 1e-3, leaves);
  };
  agree(ranks.comm, [&] { device.plan_memory(ranks, kMicroBatch, rehearsal); });
  TrainStep step(model, options, policy, device.comm(), device.memory(), device.stream());
  step.initialize();
  Watch watch;
  watch.rank = ranks.comm.rank();
  watch.fault = fault;
  watch.stream = &device.stream();
  step.runner().set_gradient_hook(watch_gradient, &watch);
  Run run;
  for (int64_t s = 0; s < kSteps; ++s) {
    watch.step = s;
    const StepReport report = step(s, 5e-3, leaves);
    (s == 0 ? run.first_loss : run.last_loss) = report.decision.loss;
  }
  collect(step, ranks.comm, device.stream(), run);
  run.gradients = std::move(watch.seen);
  return run;
}

// Where the gradients of all ranks part first from those of one rank alone; empty: nowhere. Each
// rank looks at its own leaves; after the step of the fault all ranks differ, so the earliest step
// is it, and in a leaf the unit that backward comes to first, which is the last one.
std::string first_difference(const Run& alone, const Run& together, const RankContext& ranks) {
  using Place = std::array<int64_t, 3>;  // step, leaf, minus unit: the smallest is the first
  Place mine{INT64_MAX, 0, 0};
  for (const auto& [where, fingerprint] : together.gradients) {
    const auto it = alone.gradients.find(where);
    if (it != alone.gradients.end() && it->second == fingerprint) continue;
    const auto& [step, leaf, unit] = where;
    mine = std::min(mine, Place{step, leaf, -unit});
  }
  std::vector<Place> all(ranks.comm.size());
  ranks.comm.all_gather_bytes(std::as_writable_bytes(std::span(all)),
                              std::as_bytes(std::span(&mine, 1)));
  const auto first = std::min_element(all.begin(), all.end());
  const auto [step, leaf, minus_unit] = *first;
  if (step == INT64_MAX) return "";
  return fmt::format("rank {}: gradient of {} in leaf {}, step {} differs from one rank alone",
                     first - all.begin(), Gpt(tiny_gpt()).units()[-minus_unit]->path(), leaf, step);
}

// Whether every rank's device has the precision.
bool everywhere(const Config& config, RankContext& ranks, const char* precision) {
  RankDevice device(config, ranks);
  int64_t lacking = !device.has(precision_from_name(precision));
  ranks.comm.all_reduce_sum({&lacking, 1});
  return lacking == 0;
}

}  // namespace

std::vector<SmokeRow> smoke(const Config& config, RankContext& ranks, SmokeFault fault) {
  std::vector<SmokeRow> rows;
  for (const char* precision : {"fp32", "bf16", "fp16", "bf16-true"}) {
    if (!everywhere(config, ranks, precision)) continue;
    Run alone;
    {
      const auto group = ThreadGroup::make(1);
      const auto self = group->communicator(0);
      RankContext one{*self, ranks.local_rank, ranks.local_size, ""};
      alone = train(config, one, precision, 0, nullptr);
    }
    for (int zero : {0, 1, 2, 3}) {
      const Run together = train(config, ranks, precision, zero, fault);
      SmokeRow row{precision, zero, together.first_loss, together.last_loss, together.hash, ""};
      row.error = first_difference(alone, together, ranks);
      // Without a difference in a leaf the sum is it.
      if (row.error.empty() && together.hash != alone.hash) {
        for (const auto& [name, bits] : together.tensors) {
          if (bits == alone.tensors.at(name)) continue;
          row.error = fmt::format("{} differs from one rank alone; all leaf gradients agree", name);
          break;
        }
      }
      if (row.error.empty() && !(row.last_loss < row.first_loss)) {
        row.error = "the loss did not fall";
      }
      rows.push_back(row);
    }
  }
  return rows;
}

int print_smoke(const std::vector<SmokeRow>& rows, const RankContext& ranks) {
  int failed = 0;
  for (const SmokeRow& row : rows) failed += !row.error.empty();
  if (ranks.leads()) {
    std::printf("%-10s %-6s %-17s %-34s %s\n", "precision", "zero", "loss", "hash", "result");
    for (const SmokeRow& row : rows) {
      std::printf("%-10s %-6d %.4f -> %.4f  %-34s %s\n", row.precision.c_str(), row.zero,
                  row.first_loss, row.last_loss, row.hash.c_str(),
                  row.error.empty() ? "pass" : ("FAIL: " + row.error).c_str());
    }
    std::printf("%zu passed, %d failed, %d rank%s over %s\n", rows.size() - failed, failed,
                ranks.comm.size(), ranks.comm.size() == 1 ? "" : "s", ranks.comm.transport());
  }
  return failed ? static_cast<int>(ExitCode::internal) : 0;
}

int run_smoke(const Config& config, RankContext& ranks) {
  return print_smoke(smoke(with_defaults(config), ranks), ranks);
}

}  // namespace shardrun
