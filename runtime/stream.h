// A stream: the place where kernels of one rank run. It says which device kind, which instruction
// set and which threads, and counts the work given to it. On the CPU a call has finished when it
// returns; on a GPU it is queued (runtime/device.h has the rules); on `meta` nothing is computed and
// only the counts move.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/thread_pool.h"

namespace shardrun {

class Device;
enum class Priority : uint8_t;

enum class DeviceKind : uint8_t { cpu, meta, cuda };
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

// What a library keeps for one stream: its handle, the algorithms it chose. Made by the kernel that
// needs it; goes before the stream does.
class LibraryState {
 public:
  virtual ~LibraryState() = default;
};

class Stream {
 public:
  Stream(DeviceKind kind, Isa isa, ThreadPool* pool) : kind_(kind), isa_(isa), pool_(pool) {}
  // Of a GPU, with memory of a fixed size for kernels that need some while they run: they follow
  // one another on the stream, so one piece serves all. The device outlives the stream.
  Stream(Device& device, size_t workspace_bytes, Priority priority);
  ~Stream();
  Stream(const Stream&) = delete;

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

  // The host waits until all that was given is done.
  void synchronize();

  // GPUs only; null elsewhere.
  Device* device() const { return device_; }
  void* handle() const { return handle_; }        // cudaStream_t
  void* workspace(size_t bytes) const;            // DeviceError past the fixed size
  size_t workspace_bytes() const { return workspace_bytes_; }
  std::unique_ptr<LibraryState>& matmul_state() { return matmul_state_; }  // of the matrix products

 private:
  DeviceKind kind_;
  Isa isa_;
  ThreadPool* pool_;
  bool idle_ = false;
  WorkCount work_;
  Device* device_ = nullptr;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::unique_ptr<LibraryState> matmul_state_;
};

}  // namespace shardrun
