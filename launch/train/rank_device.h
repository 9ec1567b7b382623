// What a rank computes with, made from the command line: CPU threads or a GPU, the stream, the memory,
// and the communicator that carries tensors of that device.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "launch/config/config.h"
#include "launch/ranks.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"
#include "sharding/precision.h"

namespace shardrun {

class RankDevice {
 public:
  // All ranks call. DeviceError, on every rank, where a GPU is asked for and not there, or where two
  // ranks would sit on one GPU and nobody asked for a transport that can serve that (--comm mpi,
  // staged or thread:N): before anything is allocated. Several ranks on GPUs of their own talk by NCCL
  // where it is there and nothing else was asked for.
  RankDevice(const Config& config, const RankContext& ranks);

  Stream& stream() { return *stream_; }
  const Device* gpu() const { return gpu_.get(); }  // null on the CPU
  Communicator& comm() const { return of_gpus_ ? *of_gpus_ : host_; }
  int threads() const { return pool_.threads(); }
  std::string name() const;  // "cpu", "NVIDIA H200 (GPU 0, sm_90)"

  // ConfigError where the device lacks the precision.
  void require(Precision precision) const;
  bool has(Precision precision) const;

  // Records `rehearsal` on the device kind meta with a communicator that moves nothing, plans every
  // offset, and makes the arena. The rehearsal runs each program once. Where the GPU has too little
  // memory the DeviceError says what was asked, what is free, and the largest micro-batch that would
  // fit, found by rehearsing smaller ones.
  using Rehearsal =
      FunctionRef<void(int64_t micro_batch, Communicator& comm, Memory& memory, Stream& stream)>;
  void plan_memory(const RankContext& ranks, int64_t micro_batch, Rehearsal rehearsal);
  Memory& memory() { return *memory_; }
  const MemoryPlan& plan() const { return plan_; }

 private:
  void open_gpu(const DeviceChoice& choice, const RankContext& ranks);
  void refuse_sharing(const Config& config, const RankContext& ranks) const;
  MemoryPlan rehearse(const RankContext& ranks, int64_t micro_batch, Rehearsal rehearsal);
  std::string does_not_fit(const RankContext& ranks, int64_t micro_batch, size_t free,
                           Rehearsal rehearsal);

  std::unique_ptr<Communicator> make_comm(const Config& config) const;

  // From the last to the first they go: NCCL before the memory that it knows, that before the stream,
  // the stream before its GPU.
  Communicator& host_;
  ThreadPool pool_;
  std::unique_ptr<Device> gpu_;
  std::unique_ptr<Stream> stream_;
  MemoryPlan plan_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Communicator> of_gpus_;
};

}  // namespace shardrun
