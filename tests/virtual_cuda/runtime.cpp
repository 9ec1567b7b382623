// The symbols of the CUDA runtime that the backend calls, and what tests set and read.
#include "tests/virtual_cuda/runtime.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tests/virtual_cuda/device.h"
#include "tests/virtual_cuda/sites.h"
#include "tests/virtual_cuda/state.h"

namespace shardrun::virtual_cuda {

namespace {

// ---- of each thread
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t described = cudaSuccess;
thread_local std::string description;

void make_devices(State& s) {
  for (size_t i = s.devices.size(); i < static_cast<size_t>(s.settings.devices); ++i) {
    s.devices.push_back(std::make_unique<VirtualDevice>());
    s.devices.back()->index = static_cast<int>(i);
    s.devices.back()->draw.seed(s.settings.seed * 1000003 + i);
  }
}

// "name:n" or "name:n:error", several with commas in between.
void add_faults(State& s, const char* text, bool drops) {
  for (std::string rest = text; !rest.empty();) {
    const std::string one = rest.substr(0, rest.find(','));
    rest.erase(0, one.size() + 1);
    const size_t colon = one.find(':');
    if (colon == std::string::npos) continue;
    char* end = nullptr;
    Fault fault{
        one.substr(0, colon), std::strtoll(one.c_str() + colon + 1, &end, 10), cudaSuccess, -1, {}};
    if (!drops) {
      fault.error = *end == ':' ? static_cast<cudaError_t>(std::atoi(end + 1)) : cudaErrorUnknown;
    }
    s.faults.push_back(std::move(fault));
  }
}

// Every call of the library begins with one: it holds the lock, counts, and has an answer where the
// call is to fail or to do nothing.
class Call {
 public:
  enum class On : uint8_t { any, sound };  // a broken device answers with its error

  explicit Call(const char* name, On on = On::sound) : name_(name), lock_(state().mutex) {
    State& s = state();
    if (static_cast<size_t>(current) < s.devices.size()) {
      VirtualDevice& device = current_device();
      device.touched = Clock::now();
      if (on == On::sound && device.error != cudaSuccess) {
        answer = fails(device.error, device.error_text);
      }
    } else if (on == On::sound) {
      answer = fails(cudaErrorNoDevice, "there is no virtual device");
    }
    ++s.calls[{name, current}];
    for (Fault& fault : s.faults) {
      if (fault.function != name || (fault.device >= 0 && fault.device != current)) continue;
      if (++fault.seen[current] != fault.n) continue;
      ++s.faults_met;
      answer = fault.error == cudaSuccess ? cudaSuccess : fails(fault.error, "a planned failure");
    }
    if (!answer && left_out_of_host(name)) answer = cudaSuccess;
  }
  Call(const Call&) = delete;

  cudaError_t fails(cudaError_t error, const std::string& text) const {
    last_error = error;
    return error_with_text(error, text);
  }
  // Runs work until `done`.
  cudaError_t waits(const std::function<bool()>& done) const {
    VirtualDevice& device = current_device();
    const cudaError_t error = run_until(device, name_, done);
    return error == cudaSuccess ? error : fails(error, device.error_text);
  }

  std::optional<cudaError_t> answer;

 private:
  const char* name_;
  std::lock_guard<std::recursive_mutex> lock_;
};

CUstream_st* find_stream(cudaStream_t stream) {
  for (auto& device : state().devices) {
    for (auto& s : device->streams) {
      if (s.get() == stream) return s.get();
    }
  }
  return nullptr;
}
CUevent_st* find_event(cudaEvent_t event) {
  for (auto& device : state().devices) {
    for (auto& e : device->events) {
      if (e.get() == event) return e.get();
    }
  }
  return nullptr;
}

VirtualDevice& device_of(const CUstream_st& stream) {
  return *state().devices[static_cast<size_t>(stream.device)];
}

// "" when the calling thread's device may be given work on it.
std::string wrong_stream(cudaStream_t stream) {
  const CUstream_st* s = find_stream(stream);
  if (!s) return "there is no such stream, or it was destroyed";
  if (s->device != current) {
    return fmt::format("stream {} is of device {}, current is device {}", s->number, s->device,
                       current);
  }
  return "";
}

cudaError_t give(const Call& call, cudaStream_t stream, Work work) {
  VirtualDevice& device = current_device();
  if (!stream) {
    // The default stream waits for all others here, and they for it.
    const cudaError_t error = call.waits([&] { return all_done(device); });
    if (error != cudaSuccess) return error;
    if (state().logs) {
      state().log.push_back(
          {device.index, 0, work.kind, work.name, work.bytes, device.work_given++, -1});
    }
    const cudaError_t later = call.waits([&] { return !work.ready || work.ready(); });
    if (later != cudaSuccess) return later;
    try {
      if (work.run) work.run();
    } catch (const std::exception& e) {
      break_device(device, cudaErrorLaunchFailure, e.what());
    }
    return cudaSuccess;
  }
  const std::string wrong = wrong_stream(stream);
  if (!wrong.empty()) return call.fails(cudaErrorInvalidResourceHandle, wrong);
  Queued queued;
  queued.work = std::move(work);
  enqueue(device, *stream, std::move(queued));
  return cudaSuccess;
}

MemoryKind kind_at(const void* data, size_t bytes) {
  const auto* at = allocation_at(data, bytes);
  return at ? at->second.kind : MemoryKind::unknown;
}

cudaError_t copy(const Call& call, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const MemoryKind to_kind = kind_at(to, bytes), from_kind = kind_at(from, bytes);
  for (const void* end : {static_cast<const void*>(to), from}) {
    if (kind_at(end, bytes) == MemoryKind::unknown) continue;
    const std::string wrong = not_reachable(end, bytes);
    if (!wrong.empty()) return call.fails(cudaErrorInvalidValue, wrong);
  }
  const bool to_device = to_kind == MemoryKind::device;
  const bool from_device = from_kind == MemoryKind::device;
  if (kind != cudaMemcpyDefault) {
    const bool says_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool says_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (says_to != to_device || says_from != from_device) {
      return call.fails(
          cudaErrorInvalidValue,
          fmt::format("a copy of kind {} from {} memory to {} memory", static_cast<int>(kind),
                      from_device ? "device" : "host", to_device ? "device" : "host"));
    }
  }
  if (to_kind == MemoryKind::unknown && from_kind == MemoryKind::unknown) {
    return call.fails(
        cudaErrorInvalidValue,
        fmt::format("neither {} nor {} is device or pinned memory, or it was freed", to, from));
  }
  const char* name = to_device ? (from_device ? "device to device" : "host to device")
                               : (from_device ? "device to host" : "host to host");
  // Pageable memory: the source is read before the call returns, the target is written before it
  // does.
  if (from_kind == MemoryKind::unknown) {
    const std::byte* source = static_cast<const std::byte*>(from);
    auto staged = std::make_shared<std::vector<std::byte>>(source, source + bytes);
    return give(
        call, stream,
        {Kind::copy, name, bytes, [=] { std::memcpy(to, staged->data(), bytes); }, {}, {to}});
  }
  const cudaError_t error =
      give(call, stream,
           {Kind::copy, name, bytes, [=] { std::memmove(to, from, bytes); }, {}, {to, from}});
  const bool at_once = to_kind == MemoryKind::unknown || (!to_device && !from_device);
  if (error != cudaSuccess || !at_once || !stream) return error;
  return call.waits([&] { return stream->queue.empty(); });
}

cudaError_t capture(const Call& call) {
  return call.fails(cudaErrorNotSupported, "the virtual device captures no graphs yet");
}

}  // namespace

// Outlives every thread and static that uses it.
State& state() {
  static State state;
  return state;
}

State::State() {
  const auto from = [](const char* name) {
    return std::getenv(("SHARDRUN_VIRTUAL_CUDA_" + std::string(name)).c_str());
  };
  if (const char* seed = from("SEED")) settings.seed = std::strtoull(seed, nullptr, 10);
  if (const char* bytes = from("MEMORY")) settings.memory_bytes = std::strtoull(bytes, nullptr, 10);
  if (const char* devices = from("DEVICES")) settings.devices = std::atoi(devices);
  if (const char* name = from("ARCHITECTURE")) settings.architecture = name;
  if (const char* faults_text = from("FAIL")) add_faults(*this, faults_text, false);
  if (const char* drops = from("DROP")) add_faults(*this, drops, true);
  device().set_limits(limits_of(settings.architecture));
  device().set_seed(settings.seed);
  make_devices(*this);
}

VirtualDevice& current_device() {
  return *state().devices.at(static_cast<size_t>(current));
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"kernel", "copy", "set", "record", "wait", "host", "library"};
  return kNames[static_cast<int>(kind)];
}

// ---- what tests set and read

void reset(const Settings& settings) {
  const std::lock_guard lock(state().mutex);
  State& s = state();
  s.settings = settings;
  device().set_limits(limits_of(settings.architecture));
  device().set_seed(settings.seed);
  s.faults.clear();
  s.faults_met = 0;
  s.calls.clear();
  s.log.clear();
  s.logs = false;
  make_devices(s);
  for (auto& d : s.devices) begin_schedule(*d);
}

void fail(const std::string& function, int64_t n, cudaError_t error, int device) {
  const std::lock_guard lock(state().mutex);
  state().faults.push_back({function, n, error, device, {}});
}

void drop(const std::string& function, int64_t n, int device) {
  fail(function, n, cudaSuccess, device);
}

int64_t faults_met() {
  const std::lock_guard lock(state().mutex);
  return state().faults_met;
}

int64_t calls(const std::string& function, int device) {
  const std::lock_guard lock(state().mutex);
  int64_t sum = 0;
  for (const auto& [key, count] : state().calls) {
    if (key.first == function && (device < 0 || device == key.second)) sum += count;
  }
  return sum;
}

Living living(int device) {
  const std::lock_guard lock(state().mutex);
  Living out;
  for (const auto& [data, allocation] : state().allocations) {
    if (device >= 0 && allocation.device != device) continue;
    ++(allocation.kind == MemoryKind::device ? out.allocations : out.host_allocations);
  }
  for (const auto& d : state().devices) {
    if (device >= 0 && d->index != device) continue;
    out.streams += static_cast<int64_t>(d->streams.size());
    out.events += static_cast<int64_t>(d->events.size());
    out.bytes += d->bytes;
    out.most_bytes += d->most_bytes;
  }
  return out;
}

void keep_log(bool on) {
  const std::lock_guard lock(state().mutex);
  state().logs = on;
}

std::vector<Ran> take_log() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().log, {});
}

std::string log_text(const std::vector<Ran>& log) {
  std::string out;
  for (const Ran& ran : log) {
    out += fmt::format("device {} stream {}: #{} {} '{}' {} bytes", ran.device, ran.stream,
                       ran.given, name_of(ran.kind), ran.name, ran.bytes);
    if (ran.waited_for >= 0) out += fmt::format(" for #{}", ran.waited_for);
    out += '\n';
  }
  return out;
}

// ---- for other libraries and launch()

cudaError_t submit(cudaStream_t stream, Work work) {
  const Call call(work.kind == Kind::kernel ? "cudaLaunchKernelEx" : work.name.c_str());
  if (call.answer) return *call.answer;
  return give(call, stream, std::move(work));
}

cudaError_t error_with_text(cudaError_t error, const std::string& text) {
  described = error;
  description = text;
  return error;
}

void submit_kernel(CUstream_st* stream, const char* kernel, std::function<void()> run) {
  const cudaError_t error = submit(stream, {Kind::kernel, kernel, 0, std::move(run), {}});
  if (error != cudaSuccess) {
    throw std::runtime_error(fmt::format("kernel {}: launch failed: {} (CUDA error {})", kernel,
                                         cudaGetErrorString(error), static_cast<int>(error)));
  }
}

void check_argument(const char* kernel, const void* data) {
  const std::string wrong = not_reachable(data, 1);
  if (!wrong.empty()) throw Violation(fmt::format("kernel {}: its argument {}", kernel, wrong));
}

void check_words(const char* kernel, const void* argument, size_t bytes) {
  constexpr uintptr_t kPage = 4096, kUserSpace = uintptr_t{1} << 47;
  const std::lock_guard lock(state().mutex);
  for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
    uintptr_t word;
    std::memcpy(&word, static_cast<const std::byte*>(argument) + at, sizeof word);
    if (word < kPage || word >= kUserSpace) continue;
    const void* data = reinterpret_cast<const void*>(word);
    unsigned char resident = 0;
    const bool mapped = mincore(reinterpret_cast<void*>(word / kPage * kPage), 1, &resident) == 0;
    if (!mapped || kind_at(data, 1) != MemoryKind::unknown) continue;
    throw Violation(
        fmt::format("kernel {}: byte {} of its argument: {}", kernel, at, not_reachable(data, 1)));
  }
}

}  // namespace shardrun::virtual_cuda

// ---- the library

using namespace shardrun::virtual_cuda;

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define SHARDRUN_NAME(name) \
  case name:                \
    return #name
    SHARDRUN_NAME(cudaSuccess);
    SHARDRUN_NAME(cudaErrorInvalidValue);
    SHARDRUN_NAME(cudaErrorMemoryAllocation);
    SHARDRUN_NAME(cudaErrorInitializationError);
    SHARDRUN_NAME(cudaErrorInsufficientDriver);
    SHARDRUN_NAME(cudaErrorNoDevice);
    SHARDRUN_NAME(cudaErrorInvalidDevice);
    SHARDRUN_NAME(cudaErrorInvalidResourceHandle);
    SHARDRUN_NAME(cudaErrorNotReady);
    SHARDRUN_NAME(cudaErrorIllegalAddress);
    SHARDRUN_NAME(cudaErrorLaunchTimeout);
    SHARDRUN_NAME(cudaErrorLaunchFailure);
    SHARDRUN_NAME(cudaErrorNotSupported);
    SHARDRUN_NAME(cudaErrorUnknown);
#undef SHARDRUN_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  return described == error && !description.empty() ? description.c_str() : cudaGetErrorName(error);
}

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Call call("cudaGetDeviceCount", Call::On::any);
  if (call.answer) return *call.answer;
  const Settings& settings = state().settings;
  *count = 0;
  if (settings.driver < CUDART_VERSION) {
    return call.fails(cudaErrorInsufficientDriver, "the driver is older than the runtime");
  }
  if (settings.devices == 0) return call.fails(cudaErrorNoDevice, "there is no virtual device");
  *count = settings.devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const Call call("cudaSetDevice", Call::On::any);
  if (call.answer) return *call.answer;
  if (device < 0 || device >= state().settings.devices) {
    return call.fails(cudaErrorInvalidDevice,
                      fmt::format("device {} of {}", device, state().settings.devices));
  }
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Call call("cudaGetDeviceProperties");
  if (call.answer) return *call.answer;
  if (device < 0 || device >= state().settings.devices) {
    return call.fails(cudaErrorInvalidDevice, fmt::format("device {}", device));
  }
  const int capability = std::atoi(state().settings.architecture.c_str() + 3);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Virtual CUDA %s",
                state().settings.architecture.c_str());
  // Of the device, so that ranks on one device can be told.
  std::memcpy(properties->uuid.bytes, "virtual cuda   ", 15);
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->totalGlobalMem = state().settings.memory_bytes;
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const Call call("cudaDriverGetVersion", Call::On::any);
  if (call.answer) return *call.answer;
  *version = state().settings.driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Call call("cudaMemGetInfo");
  if (call.answer) return *call.answer;
  *total = state().settings.memory_bytes;
  *free = *total - std::min(*total, current_device().bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Call call("cudaDeviceSynchronize");
  if (call.answer) return *call.answer;
  VirtualDevice& device = current_device();
  return call.waits([&] { return all_done(device); });
}

// ---- memory

cudaError_t cudaMalloc(void** data, size_t bytes) {
  const Call call("cudaMalloc");
  if (call.answer) return *call.answer;
  const size_t most = state().settings.memory_bytes, used = current_device().bytes;
  if (bytes > most || used > most - bytes) {
    return call.fails(cudaErrorMemoryAllocation, "out of memory");
  }
  *data = bytes == 0 ? nullptr : allocate(bytes, current, MemoryKind::device);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  const Call call("cudaMallocHost");
  if (call.answer) return *call.answer;
  *data = bytes == 0 ? nullptr : allocate(bytes, current, MemoryKind::pinned);
  return cudaSuccess;
}

static void require_no_copy(const std::pair<const std::byte* const, Allocation>& allocation) {
  const std::byte *begin = allocation.first, *end = begin + allocation.second.bytes;
  for (const auto& device : state().devices) {
    for (const auto& stream : device->streams) {
      for (const Queued& queued : stream->queue) {
        for (const void* touched : queued.work.ends) {
          const auto* first = static_cast<const std::byte*>(touched);
          if (!touched || first >= end || first + queued.work.bytes <= begin) continue;
          fmt::print(
              stderr,
              "virtual CUDA: pinned memory of {} bytes is freed before the copy #{} '{}' of {} "
              "bytes on stream {} of device {} has run\n",
              allocation.second.bytes, queued.given, queued.work.name, queued.work.bytes,
              stream->number, device->index);
          std::abort();
        }
      }
    }
  }
}

// What is broken is freed all the same.
static cudaError_t free_memory(const Call& call, void* data, MemoryKind kind) {
  if (!data) return cudaSuccess;
  const auto* at = allocation_at(data, 1);
  if (at && kind == MemoryKind::pinned) require_no_copy(*at);
  if (at && kind == MemoryKind::device) {
    VirtualDevice& device = *state().devices[static_cast<size_t>(at->second.device)];
    run_until(device, "cudaFree", [&] { return all_done(device); });
  }
  const std::string wrong = release(data, kind);
  if (!wrong.empty()) {
    // Destructors do not look at answers: an overrun must be met by who comes next.
    break_device(current_device(), cudaErrorInvalidValue, wrong);
    return call.fails(cudaErrorInvalidValue, wrong);
  }
  VirtualDevice& device = current_device();
  return device.error == cudaSuccess ? cudaSuccess : call.fails(device.error, device.error_text);
}

cudaError_t cudaFree(void* data) {
  const Call call("cudaFree", Call::On::any);
  return call.answer ? *call.answer : free_memory(call, data, MemoryKind::device);
}

cudaError_t cudaFreeHost(void* data) {
  const Call call("cudaFreeHost", Call::On::any);
  return call.answer ? *call.answer : free_memory(call, data, MemoryKind::pinned);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const Call call("cudaMemcpyAsync");
  return call.answer ? *call.answer : copy(call, to, from, bytes, kind, stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  const Call call("cudaMemsetAsync");
  if (call.answer) return *call.answer;
  if (bytes == 0) return cudaSuccess;
  const std::string wrong = not_reachable(to, bytes);
  if (!wrong.empty()) return call.fails(cudaErrorInvalidValue, wrong);
  return give(call, stream,
              {Kind::set, "memset", bytes, [=] { std::memset(to, value, bytes); }, {}});
}

// ---- streams

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  const Call call("cudaDeviceGetStreamPriorityRange");
  if (call.answer) return *call.answer;
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  const Call call("cudaStreamCreateWithPriority");
  if (call.answer) return *call.answer;
  VirtualDevice& device = current_device();
  device.streams.push_back(std::make_unique<CUstream_st>());
  *stream = device.streams.back().get();
  (*stream)->device = current;
  (*stream)->number = ++device.streams_made;
  draw_weight(device, **stream);
  return cudaSuccess;
}

// Finishes its work before it returns, where the library may return earlier.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Call call("cudaStreamDestroy", Call::On::any);
  if (call.answer) return *call.answer;
  if (!find_stream(stream)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  VirtualDevice& device = device_of(*stream);
  const cudaError_t error =
      run_until(device, "cudaStreamDestroy", [&] { return stream->queue.empty(); });
  std::erase_if(device.streams, [&](const auto& s) { return s.get() == stream; });
  return error == cudaSuccess ? error : call.fails(error, device.error_text);
}

// Waits of other threads than the stream's own are lawful.
static cudaError_t wait_for_stream(const Call& call, const char* name, cudaStream_t stream) {
  if (!find_stream(stream)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  VirtualDevice& device = device_of(*stream);
  const cudaError_t error = run_until(device, name, [&] { return stream->queue.empty(); });
  return error == cudaSuccess ? error : call.fails(error, device.error_text);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Call call("cudaStreamSynchronize");
  if (call.answer) return *call.answer;
  if (stream) return wait_for_stream(call, "cudaStreamSynchronize", stream);
  VirtualDevice& device = current_device();
  return call.waits([&] { return all_done(device); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Call call("cudaStreamQuery");
  if (call.answer) return *call.answer;
  if (!find_stream(stream)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such stream");
  }
  step(device_of(*stream));
  return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  const Call call("cudaLaunchHostFunc");
  if (call.answer) return *call.answer;
  return give(call, stream, {Kind::host, "function", 0, [=] { function(argument); }, {}});
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  const Call call("cudaStreamBeginCapture");
  return call.answer ? *call.answer : capture(call);
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  const Call call("cudaStreamEndCapture");
  return call.answer ? *call.answer : capture(call);
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Call call("cudaEventCreateWithFlags");
  if (call.answer) return *call.answer;
  VirtualDevice& device = current_device();
  device.events.push_back(std::make_unique<CUevent_st>());
  *event = device.events.back().get();
  (*event)->device = current;
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}

// What waits for its last recording goes on waiting.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Call call("cudaEventDestroy", Call::On::any);
  if (call.answer) return *call.answer;
  if (!find_event(event)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such event");
  }
  std::erase_if(state().devices[static_cast<size_t>(event->device)]->events,
                [&](const auto& e) { return e.get() == event; });
  return cudaSuccess;
}

// Why a call may not use the two together; "" when it may.
static std::string wrong_pair(cudaStream_t stream, cudaEvent_t event) {
  if (!find_event(event)) return "there is no such event, or it was destroyed";
  if (!find_stream(stream)) return "there is no such stream, or it was destroyed";
  return "";
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Call call("cudaEventRecord");
  if (call.answer) return *call.answer;
  std::string wrong = wrong_pair(stream, event);
  if (wrong.empty() && event->device != stream->device) {
    wrong = fmt::format("the event is of device {}, the stream of device {}", event->device,
                        stream->device);
  }
  if (!wrong.empty()) return call.fails(cudaErrorInvalidResourceHandle, wrong);
  Queued queued;
  queued.work = {Kind::record, "event", 0, {}, {}};
  queued.records = event->latest = std::make_shared<Point>();
  enqueue(device_of(*stream), *stream, std::move(queued));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Call call("cudaStreamWaitEvent");
  if (call.answer) return *call.answer;
  const std::string wrong = wrong_pair(stream, event);
  if (!wrong.empty()) return call.fails(cudaErrorInvalidResourceHandle, wrong);
  if (!event->latest) return cudaSuccess;
  Queued queued;
  queued.work = {Kind::wait, "event", 0, {}, {}};
  queued.waits_for = event->latest;
  enqueue(device_of(*stream), *stream, std::move(queued));
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Call call("cudaEventSynchronize");
  if (call.answer) return *call.answer;
  if (!find_event(event)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such event");
  }
  if (!event->latest) return cudaSuccess;
  VirtualDevice& device = *state().devices[static_cast<size_t>(event->device)];
  const cudaError_t error =
      run_until(device, "cudaEventSynchronize", [point = event->latest] { return point->reached; });
  return error == cudaSuccess ? error : call.fails(error, device.error_text);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Call call("cudaEventQuery");
  if (call.answer) return *call.answer;
  if (!find_event(event)) {
    return call.fails(cudaErrorInvalidResourceHandle, "there is no such event");
  }
  if (!event->latest) return cudaSuccess;
  step(*state().devices[static_cast<size_t>(event->device)]);
  return event->latest->reached ? cudaSuccess : cudaErrorNotReady;
}

// Of this machine, which tells nothing about any other.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Call call("cudaEventElapsedTime");
  if (call.answer) return *call.answer;
  for (cudaEvent_t event : {begin, end}) {
    if (!find_event(event) || !event->timed || !event->latest) {
      return call.fails(cudaErrorInvalidResourceHandle,
                        "there is no such event, it has no time, or it was never recorded");
    }
    if (!event->latest->reached) return cudaErrorNotReady;
  }
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->latest->when - begin->latest->when).count();
  return cudaSuccess;
}

}  // extern "C"
