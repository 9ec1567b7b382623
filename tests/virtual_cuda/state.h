// What the parts of the virtual CUDA runtime share: its devices, queues, memory and faults. Only
// runtime.cpp, schedule.cpp and allocations.cpp include it; all of it is guarded by state().mutex.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "tests/virtual_cuda/runtime.h"

namespace shardrun::virtual_cuda {

// What a recorded event stands for; events and waits share it.
struct Point {
  int64_t given = -1;
  bool reached = false;
  std::chrono::steady_clock::time_point when{};  // it was reached
  void reach() {
    reached = true;
    when = std::chrono::steady_clock::now();
  }
};

struct Queued {
  Work work;
  int64_t given = 0;
  std::shared_ptr<Point> records;    // reached when this has run
  std::shared_ptr<Point> waits_for;  // must be reached before this may run
};

}  // namespace shardrun::virtual_cuda

struct CUstream_st {
  int device = 0;
  int number = 0;
  std::deque<shardrun::virtual_cuda::Queued> queue;
  uint64_t weight = 1;  // how likely it is picked
};
struct CUevent_st {
  int device = 0;
  bool timed = false;
  std::shared_ptr<shardrun::virtual_cuda::Point> latest;  // null: never recorded
};

namespace shardrun::virtual_cuda {

using Clock = std::chrono::steady_clock;

struct VirtualDevice {
  int index = 0;
  std::mt19937_64 draw;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  int streams_made = 0;
  int64_t work_given = 0;
  size_t bytes = 0, most_bytes = 0;
  // The error after which nothing works.
  cudaError_t error = cudaSuccess;
  std::string error_text;
  Clock::time_point touched;  // by its host
};

struct Allocation {
  size_t bytes = 0;
  int device = 0;
  MemoryKind kind = MemoryKind::unknown;
};

struct Fault {
  std::string function;
  int64_t n = 0;
  cudaError_t error = cudaSuccess;  // success: the call is dropped
  int device = -1;
  std::map<int, int64_t> seen;
};

struct State {
  std::recursive_mutex mutex;
  std::condition_variable_any progress;  // some work has run somewhere
  Settings settings;
  std::vector<std::unique_ptr<VirtualDevice>> devices;
  std::map<const std::byte*, Allocation> allocations;  // by where they begin
  std::vector<Fault> faults;
  int64_t faults_met = 0;
  std::map<std::pair<std::string, int>, int64_t> calls;
  bool logs = false;
  std::vector<Ran> log;
  std::jthread helper;  // see schedule.cpp; last: it ends before what it uses

  State();
};
State& state();
VirtualDevice& current_device();

// ---- schedule.cpp
void draw_weight(VirtualDevice& device, CUstream_st& stream);
void begin_schedule(VirtualDevice& device);
void enqueue(VirtualDevice& device, CUstream_st& stream, Queued queued);
// Runs one piece of work that may run. False: there is none, or all that there is waits for others.
bool step(VirtualDevice& device);
void break_device(VirtualDevice& device, cudaError_t error, const std::string& text);
// Runs work until `done`; the error of the device, or that the deadline has passed.
cudaError_t run_until(VirtualDevice& device, const char* call, const std::function<bool()>& done);
bool all_done(const VirtualDevice& device);

// ---- allocations.cpp
void* allocate(size_t bytes, int device, MemoryKind kind);
// "" or what is wrong with it: no such allocation, or something wrote around it.
std::string release(const void* data, MemoryKind kind);
// The allocation that [data, data + bytes) lies in or touches; null when none.
const std::pair<const std::byte* const, Allocation>* allocation_at(const void* data, size_t bytes);

}  // namespace shardrun::virtual_cuda
