// A device beyond its kernels: memory, copies, events. On the CPU and on `meta` all of it is trivial
// and needs no Device; a GPU is a Device, made by make_cuda_device() (runtime/cuda/, or no_cuda.cpp
// where CUDA was not built). Upper floors use Event, HostBuffer and the copies, which serve every kind.
//
// [Note: asynchronous] On a GPU a call returns before its work is done. Work on one stream runs in
// order; across streams only what an Event orders. The host may read what a copy_to_host brought
// after Stream::synchronize() or Event::synchronize(), and must leave the source of a
// copy_from_host alone until then. Both want host memory of a HostBuffer to be asynchronous.
//
// Errors: DeviceError, with the call and the library's text.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun {

enum class Priority : uint8_t { compute, communication };  // communication is scheduled first

struct DeviceInfo {
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  int processors = 0;        // streaming multiprocessors
  size_t total_bytes = 0;
  std::string uuid;             // equal uuids: two ranks sit on one GPU
  std::string driver, toolkit;  // "13.0"
};

class Device {
 public:
  virtual ~Device() = default;
  virtual int index() const = 0;  // among the visible ones
  virtual const DeviceInfo& info() const = 0;
  // For the calling thread: whoever starts kernels must have called it, or have made the Device.
  virtual void make_current() = 0;
  virtual size_t free_bytes() const = 0;

  // Device memory, and host memory that the device reaches (pinned), aligned to 256 bytes at least.
  // `what` is for the message. bytes 0 gives null.
  virtual void* allocate(size_t bytes, const char* what) = 0;
  virtual void free(void* data) noexcept = 0;
  virtual void* allocate_host(size_t bytes, const char* what) = 0;
  virtual void free_host(void* data) noexcept = 0;

  // Streams and events by handle (cudaStream_t, cudaEvent_t). Own them by Stream and Event.
  virtual void* create_stream(Priority priority) = 0;
  virtual void destroy_stream(void* stream) noexcept = 0;
  virtual void synchronize_stream(void* stream) = 0;
  virtual void* create_event() = 0;
  virtual void destroy_event(void* event) noexcept = 0;
  virtual void record_event(void* event, void* stream) = 0;
  virtual void wait_event(void* stream, void* event) = 0;
  virtual void synchronize_event(void* event) = 0;
  virtual bool event_done(void* event) = 0;
  // For measurements: an event that keeps its time, and the seconds between two that are done.
  virtual void* create_timed_event() = 0;
  virtual double seconds_between(void* begin, void* end) = 0;

  // Either end may be device or pinned memory.
  virtual void copy(void* to, const void* from, size_t bytes, void* stream) = 0;
};

// How many GPUs this process sees; 0 also without a driver. cuda_unavailable() says why: "" when
// there is one, else "not in this build" or the driver's reason.
int cuda_device_count();
std::string cuda_unavailable();
// Selects GPU `index` for the calling thread and opens it.
std::unique_ptr<Device> make_cuda_device(int index);

// A point in a stream's work. Where the stream has no Device all of it does nothing: work is done
// when a call returns.
class Event {
 public:
  Event() = default;
  ~Event() { reset(); }
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    Event taken(std::move(other));
    swap(taken);
    return *this;
  }

  void record(Stream& stream);         // later recordings replace earlier ones
  void wait_on(Stream& stream) const;  // what `stream` is given next runs after the recorded point
  void synchronize() const;            // the host waits
  bool done() const;                   // has the recorded point been reached?
                                       // An event that was never recorded holds nobody up.

 private:
  void reset();
  void swap(Event& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
  }
  Device* device_ = nullptr;
  void* handle_ = nullptr;
};

// Host memory for copies: pinned when `device` is a GPU, plain otherwise.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Device* device, size_t bytes, const char* what);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept { swap(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    HostBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(HostBuffer& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// All bytes of the tensor. On the CPU at once; on an idle stream and on `meta` nothing moves.
void copy_to_host(void* host, ConstTensor tensor, Stream& stream);
void copy_from_host(Tensor tensor, const void* host, Stream& stream);

// Fills a tensor with what `write` puts into host memory, elements [begin, begin + out.numel()) at a
// time: all of it in place on the CPU, pieces through pinned memory of a fixed size for a GPU, where
// the host waits for each.
void fill_from_host(Tensor tensor, Stream& stream,
                    FunctionRef<void(int64_t begin, Tensor out)> write);

// A tensor's bytes where the host can look at them, after a wait: the tensor itself on the CPU, a
// copy of a GPU's. For tests and checks; not for a step.
class HostView {
 public:
  HostView(ConstTensor tensor, Stream& stream);
  const std::byte* data() const { return data_; }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  HostBuffer copy_;
  const std::byte* data_;
};

}  // namespace shardrun
