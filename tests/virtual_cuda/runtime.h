// The CUDA runtime that is none: the symbols that the backend calls (include/cuda_runtime.h), over
// host memory. What tests set and read, and what other virtual libraries (cuBLASLt, NCCL) need.
//
// [Note: late and in any order] Work given to a stream is queued. It runs when the host waits, when
// it asks (a query moves one piece of work) or, under some seeds, soon after it was given; never
// in an order that streams, events and synchronisation forbid, otherwise in one drawn from the
// seed. Seed 0 is the plainest: as late as possible, in the order given. So a wait that is missing
// shows as wrong bits under some seed, and the seed brings it back.
//
// Memory is NaN in every floating format when it comes and when it goes. A call that names memory
// outside of an allocation fails and says so, as does a kernel given a pointer to host memory; the
// 256 bytes around each allocation are watched, by the address sanitizer where it is built in. Pinned
// memory that is freed while a copy still has to come by ends the program, as nobody looks at what
// destructors are told. (cudaFree waits for the device, of cudaFreeHost that is promised nowhere.) A
// violation inside a kernel is an error of the device: from then on every call fails with its text.
//
// State belongs to a virtual device; threads choose theirs by cudaSetDevice, and ranks may be
// threads of one process with a device each. One lock guards all: kernels run one at a time.
// Everything below may be called from any thread; what is set holds from the next call on.
//
// The environment can set it too, read once at first use (for programs, under mpirun):
// SHARDRUN_VIRTUAL_CUDA_SEED, _MEMORY (bytes), _DEVICES, _ARCHITECTURE (sm_90),
// _FAIL (cudaMalloc:3:2,... : the third call fails with error 2), _DROP (cudaStreamWaitEvent:5,...).
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardrun::virtual_cuda {

// ---- What tests set.
struct Settings {
  uint64_t seed = 0;
  size_t memory_bytes = size_t{16} << 30;  // of each device
  int devices = 8;                         // 0 with driver > 0: cudaErrorNoDevice
  std::string architecture = "sm_90";
  int driver = 13000;  // 0: none is loaded; older than the toolkit's: cudaErrorInsufficientDriver
  int deadline_ms = 60000;  // for work that waits for other ranks
};
// Forgets faults, counts, the log and errors of devices, and begins each schedule anew. Memory,
// streams and events that are still there stay; queued work is dropped.
void reset(const Settings& settings = {});

// The n-th call of `function` from now on, from 1, on `device` (-1: on each), fails with `error`,
// or does nothing and says that it worked. The first is for error paths, the second for mutations.
void fail(const std::string& function, int64_t n, cudaError_t error, int device = -1);
void drop(const std::string& function, int64_t n, int device = -1);
int64_t faults_met();  // calls that failed or were dropped

// ---- What tests read.
int64_t calls(const std::string& function, int device = -1);  // -1: all devices

struct Living {
  int64_t allocations = 0, host_allocations = 0, streams = 0, events = 0;
  size_t bytes = 0, most_bytes = 0;  // device memory now, and the most since reset()
  bool operator==(const Living&) const = default;
};
Living living(int device = -1);

enum class Kind : uint8_t { kernel, copy, set, record, wait, host, library };
const char* name_of(Kind kind);

// One piece of work that was run. `given` numbers the work of a device in the order in which the
// host gave it; a wait names the record that it waited for.
struct Ran {
  int device = 0;
  int stream = 0;  // 1, 2, ... in order of creation on the device; 0: the default stream
  Kind kind = Kind::kernel;
  std::string name;
  size_t bytes = 0;
  int64_t given = 0;
  int64_t waited_for = -1;
};
void keep_log(bool on);
std::vector<Ran> take_log();  // in the order run; forgets it
std::string log_text(const std::vector<Ran>& log);

// ---- For other virtual libraries, and launch().
struct Work {
  Kind kind = Kind::library;
  std::string name;
  size_t bytes = 0;
  std::function<void()> run;  // what it throws becomes the device's error
  // May it run now? Asked often; must not block. Without one it may as soon as it is its turn. Work
  // that has one waits for others than this device: past the deadline that is an error, and a
  // thread of this library brings it forward while the host is busy elsewhere.
  std::function<bool()> ready;
  // Of a copy: from where and to where, `bytes` each. Pinned memory among them must outlive it.
  std::array<const void*, 2> ends{};
};
// The calling thread's device, on which the stream must be. Refuses like a CUDA call: an error of
// the device, cudaErrorInvalidResourceHandle. On the default stream it runs before this returns.
cudaError_t submit(cudaStream_t stream, Work work);

// Sets what cudaGetErrorString answers to `error` on this thread, and returns it.
cudaError_t error_with_text(cudaError_t error, const std::string& text);

enum class MemoryKind : uint8_t { unknown, device, pinned };
MemoryKind memory_kind(const void* data);
// "" when [data, data + bytes) lies inside one allocation of a device or of pinned memory, else why not.
std::string not_reachable(const void* data, size_t bytes);

}  // namespace shardrun::virtual_cuda
