#include "launch/train/rank_device.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "launch/train/job.h"
#include "runtime/random.h"

namespace shardrun {

static int threads_of(const Config& config, const RankContext& ranks) {
  if (config.threads() > 0) return static_cast<int>(config.threads());
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  return std::max(1, cores / std::max(1, ranks.local_size));
}

// agree: processors and GPUs may differ between nodes, and a rank that refuses must not leave alone.
RankDevice::RankDevice(const Config& config, const RankContext& ranks)
    : host_(ranks.comm), pool_(threads_of(config, ranks)) {
  flush_denormals_on_this_thread();
  agree(ranks.comm, [&] {
    const DeviceChoice choice = parse_device(config.device());
    if (choice.cuda || (choice.automatic && cuda_device_count() > 0)) open_gpu(choice, ranks);
  });
  refuse_sharing(config, ranks);
  agree(ranks.comm, [&] {
    if (gpu_) {
      stream_ = std::make_unique<Stream>(*gpu_, static_cast<size_t>(config.workspace()),
                                         Priority::compute);
    } else {
      if (config.comm() == "nccl" || config.comm() == "staged") {
        throw ConfigError("--comm {} carries tensors of GPUs; wanted --device cuda, or --comm mpi",
                          config.comm());
      }
      stream_ = std::make_unique<Stream>(DeviceKind::cpu, isa_from_name(config.isa()), &pool_);
    }
  });
  if (gpu_) of_gpus_ = make_comm(config);
}

// Collective. What a rank's library lacks, all do without, or are told.
std::unique_ptr<Communicator> RankDevice::make_comm(const Config& config) const {
  const bool chosen = config.comm() == "nccl";
  if (chosen || (config.comm() == "auto" && host_.size() > 1)) {
    const std::string unavailable = nccl_unavailable();
    int64_t missing = unavailable.empty() ? 0 : 1;
    host_.all_reduce_max({&missing, 1});
    agree(host_, [&] {
      if (chosen && !unavailable.empty()) throw DeviceError("--comm nccl: {}", unavailable);
    });
    if (missing == 0) return make_nccl_communicator(host_, *gpu_, 0);
  }
  return make_staged_communicator(host_, *gpu_);
}

void RankDevice::open_gpu(const DeviceChoice& choice, const RankContext& ranks) {
  const int count = cuda_device_count();
  if (count == 0) throw DeviceError("--device cuda: {}", cuda_unavailable());
  const int index = choice.index.value_or(ranks.local_rank % count);
  if (index >= count) {
    throw DeviceError("--device cuda:{}: this process sees {} GPU{}, 0 to {}", index, count,
                      count == 1 ? "" : "s", count - 1);
  }
  gpu_ = make_cuda_device(index);
}

// Equal ids of GPUs tell, not indices: a launcher may show each rank a GPU of its own as number 0.
void RankDevice::refuse_sharing(const Config& config, const RankContext& ranks) const {
  uint64_t mine = gpu_ ? mix64(hash_name(host_name()), hash_name(gpu_->info().uuid)) : 0;
  std::vector<uint64_t> all(static_cast<size_t>(ranks.comm.size()));
  ranks.comm.all_gather_bytes(std::as_writable_bytes(std::span(all)),
                              std::as_bytes(std::span(&mine, 1)));
  const std::string& asked = config.comm();
  if (asked == "mpi" || asked == "staged" || asked.starts_with("thread:")) return;
  agree(ranks.comm, [&] {
    const auto other = std::find(all.begin(), all.begin() + ranks.comm.rank(), mine);
    if (!gpu_ || other == all.begin() + ranks.comm.rank()) return;
    throw DeviceError(
        "ranks {} and {} would share GPU {} ({}): {} ranks on this node, {} GPU{}. Start one rank "
        "for each GPU, or ask for --comm mpi or --comm staged, which go through host memory and "
        "let ranks share one, or --device cpu",
        other - all.begin(), ranks.comm.rank(), gpu_->index(), gpu_->info().name, ranks.local_size,
        cuda_device_count(), cuda_device_count() == 1 ? "" : "s");
  });
}

std::string RankDevice::name() const {
  if (!gpu_) return "cpu";
  const DeviceInfo& info = gpu_->info();
  return fmt::format("{} (GPU {}, sm_{}{})", info.name, gpu_->index(), info.major, info.minor);
}

bool RankDevice::has(Precision precision) const {
  return !gpu_ || compute_dtype(precision) != Dtype::bf16 || gpu_->info().major >= 8;
}

void RankDevice::require(Precision precision) const {
  if (has(precision)) return;
  throw ConfigError("--precision {}: {} has no bf16 arithmetic, which came with sm_80; wanted fp16",
                    name_of(precision), name());
}

// ---- memory

MemoryPlan RankDevice::rehearse(const RankContext& ranks, int64_t micro_batch,
                                Rehearsal rehearsal) {
  RecordingMemory recorder;
  Stream meta(DeviceKind::meta, stream_->isa(), &pool_);
  const std::string transport = comm().transport();
  const std::string like = transport == "nccl"               ? "nccl"
                           : transport.starts_with("staged") ? "staged"
                           : transport.starts_with("mpi")    ? "mpi"
                                                             : "thread";
  const auto meta_comm = make_meta_communicator(ranks.comm.rank(), ranks.comm.size(), like);
  rehearsal(micro_batch, *meta_comm, recorder, meta);
  return recorder.plan();
}

void RankDevice::plan_memory(const RankContext& ranks, int64_t micro_batch, Rehearsal rehearsal) {
  plan_ = rehearse(ranks, micro_batch, rehearsal);
  if (!gpu_) {
    memory_ = make_arena_memory(plan_);
    return;
  }
  const size_t free = gpu_->free_bytes();
  if (plan_.arena_bytes() > free) {
    throw DeviceError("{}", does_not_fit(ranks, micro_batch, free, rehearsal));
  }
  try {
    memory_ = make_arena_memory(plan_, gpu_.get());
    const std::span<std::byte> arena = memory_->whole();
    comm().register_memory(arena.data(), arena.size());
  } catch (const DeviceError& error) {  // another process was faster, or the rest is in pieces
    throw DeviceError("{} ({})", does_not_fit(ranks, micro_batch, free, rehearsal), error.what());
  }
}

// Rehearsals are cheap, and memory grows with the micro-batch: halving finds the largest that fits.
std::string RankDevice::does_not_fit(const RankContext& ranks, int64_t micro_batch, size_t free,
                                     Rehearsal rehearsal) {
  const auto text = [](size_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  std::string message = fmt::format(
      "{} has too little memory: asked {} ({} kept, {} in a step) beside a workspace of "
      "{} (--workspace), free {} of {}",
      name(), text(plan_.arena_bytes()), text(plan_.persistent_bytes),
      text(plan_.arena_bytes() - plan_.persistent_bytes), text(stream_->workspace_bytes()),
      text(free), text(gpu_->info().total_bytes));
  int64_t fits = 0, too_large = micro_batch;
  size_t needs = 0;
  while (too_large - fits > 1) {
    const int64_t middle = fits + (too_large - fits) / 2;
    const size_t bytes = rehearse(ranks, middle, rehearsal).arena_bytes();
    if (bytes <= free) {
      fits = middle;
      needs = bytes;
    } else {
      too_large = middle;
    }
  }
  if (fits > 0) {
    return message + fmt::format(
                         ". --micro-batch {} is the largest that fits ({}); it cuts the batch "
                         "into other leaves, so the bits differ",
                         fits, text(needs));
  }
  return message +
         ". No micro-batch fits: use more ranks, a higher --zero, --recompute unit or a "
         "smaller --seq-len";
}

}  // namespace shardrun
