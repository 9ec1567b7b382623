// A stream: the place where kernels of one rank run. It says which device kind, which instruction
// set and which threads, and counts the work given to it. On the CPU a call has finished when it
// returns; on `meta` nothing is computed and only the counts move.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/thread_pool.h"

namespace shardrun {

enum class DeviceKind : uint8_t { cpu, meta };
const char* name_of(DeviceKind kind);

// Instruction-set levels of the CPU kernels, in order of growth.
enum class Isa : uint8_t { baseline, avx2, avx512, avx512_bf16, amx };
const char* name_of(Isa isa);
Isa detect_isa();                          // the best that this processor has
Isa isa_from_name(const std::string& name);  // UsageError names the known levels; "auto" detects

struct WorkCount {
  double flops = 0;
  double bytes = 0;  // memory traffic of operands, each counted once
};

class Stream {
 public:
  Stream(DeviceKind kind, Isa isa, ThreadPool* pool) : kind_(kind), isa_(isa), pool_(pool) {}

  DeviceKind kind() const { return kind_; }
  Isa isa() const { return isa_; }
  ThreadPool& pool() const { return *pool_; }

  // False on `meta`, and while a rank without a leaf only serves the others' collectives: kernels
  // check shapes, count work, and leave memory alone.
  bool computes() const { return kind_ != DeviceKind::meta && !idle_; }
  void set_idle(bool idle) { idle_ = idle; }
  bool idle() const { return idle_; }

  void count(double flops, double bytes) {
    work_.flops += flops;
    work_.bytes += bytes;
  }
  const WorkCount& work() const { return work_; }

 private:
  DeviceKind kind_;
  Isa isa_;
  ThreadPool* pool_;
  bool idle_ = false;
  WorkCount work_;
};

}  // namespace shardrun
