#include "launch/train/rank_device.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace shardrun {

static int threads_of(const Config& config, const RankContext& ranks) {
  if (config.threads() > 0) return static_cast<int>(config.threads());
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  return std::max(1, cores / std::max(1, ranks.local_size));
}

// Collective: processors may differ between nodes, and a rank that refuses must not leave alone.
static Isa isa_of(const Config& config, const RankContext& ranks) {
  Isa isa{};
  agree(ranks.comm, [&] { isa = isa_from_name(config.isa()); });
  return isa;
}

RankDevice::RankDevice(const Config& config, const RankContext& ranks)
    : pool_(threads_of(config, ranks)),
      stream_(DeviceKind::cpu, isa_of(config, ranks), &pool_) {
  flush_denormals_on_this_thread();
}

void RankDevice::plan_memory(
    const RankContext& ranks,
    FunctionRef<void(Communicator& comm, Memory& memory, Stream& stream)> rehearsal) {
  RecordingMemory recorder;
  Stream meta(DeviceKind::meta, stream_.isa(), &pool_);
  const std::string like = std::strncmp(ranks.comm.transport(), "mpi", 3) == 0 ? "mpi" : "thread";
  const auto comm = make_meta_communicator(ranks.comm.rank(), ranks.comm.size(), like);
  rehearsal(*comm, recorder, meta);
  plan_ = recorder.plan();
  memory_ = make_arena_memory(plan_);
}

}  // namespace shardrun
