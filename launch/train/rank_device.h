// What a rank computes with: threads, stream, memory, made from the command line.
#pragma once

#include <functional>
#include <memory>

#include "launch/ranks.h"
#include "runtime/memory.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"

namespace shardrun {

class RankDevice {
 public:
  RankDevice(const Config& config, const RankContext& ranks);

  Stream& stream() { return stream_; }
  int threads() const { return pool_.threads(); }
  // Records `rehearsal` on the device kind meta with a communicator that moves nothing, plans every
  // offset, and makes the arena. The rehearsal runs each program once.
  void plan_memory(const RankContext& ranks,
                   FunctionRef<void(Communicator& comm, Memory& memory, Stream& stream)> rehearsal);
  Memory& memory() { return *memory_; }
  const MemoryPlan& plan() const { return plan_; }

 private:
  ThreadPool pool_;
  Stream stream_;
  MemoryPlan plan_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace shardrun
