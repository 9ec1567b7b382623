// One GPU by the CUDA runtime: memory, streams, events, copies. make_cuda_device() is called by
// launch/ before anything is allocated; all else goes through the interface of runtime/device.h.
#include "runtime/device.h"

#include "runtime/cuda/check.h"

namespace shardrun {

namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string out = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return out;
}

// Handles of the interface are the library's own.
cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    make_current();
    cudaDeviceProp properties{};
    SHARDRUN_CHECK_CUDA(cudaGetDeviceProperties(&properties, index));
    int driver = 0, toolkit = 0;
    SHARDRUN_CHECK_CUDA(cudaDriverGetVersion(&driver));
    SHARDRUN_CHECK_CUDA(cudaRuntimeGetVersion(&toolkit));
    info_.name = properties.name;
    info_.major = properties.major;
    info_.minor = properties.minor;
    info_.processors = properties.multiProcessorCount;
    info_.total_bytes = properties.totalGlobalMem;
    info_.uuid = uuid_text(properties.uuid);
    info_.driver = version_text(driver);
    info_.toolkit = version_text(toolkit);
    // The smaller number is scheduled first.
    SHARDRUN_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least_, &greatest_));
  }

  int index() const override { return index_; }
  const DeviceInfo& info() const override { return info_; }

  void make_current() override { SHARDRUN_CHECK_CUDA(cudaSetDevice(index_)); }

  size_t free_bytes() const override {
    SHARDRUN_CHECK_CUDA(cudaSetDevice(index_));
    size_t free = 0, total = 0;
    SHARDRUN_CHECK_CUDA(cudaMemGetInfo(&free, &total));
    return free;
  }

  void* allocate(size_t bytes, const char* what) override {
    if (bytes == 0) return nullptr;
    make_current();
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw DeviceError("out of memory on GPU {} ({}): {} asked for {} bytes; {} of {} are free",
                        index_, info_.name, what, bytes, free_bytes(), info_.total_bytes);
    }
    cuda::check(error, "cudaMalloc");
    return data;
  }
  // Destructors come here: there is no one to tell. After an error of the device every call fails.
  void free(void* data) noexcept override { cudaFree(data); }

  void* allocate_host(size_t bytes, const char* what) override {
    if (bytes == 0) return nullptr;
    make_current();
    void* data = nullptr;
    const cudaError_t error = cudaMallocHost(&data, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw DeviceError("out of pinned host memory: {} asked for {} bytes", what, bytes);
    }
    cuda::check(error, "cudaMallocHost");
    return data;
  }
  void free_host(void* data) noexcept override { cudaFreeHost(data); }

  void* create_stream(Priority priority) override {
    make_current();
    cudaStream_t stream = nullptr;
    // Non-blocking: the default stream, on which nobody works, would order them all.
    SHARDRUN_CHECK_CUDA(cudaStreamCreateWithPriority(
        &stream, cudaStreamNonBlocking, priority == Priority::communication ? greatest_ : least_));
    return stream;
  }
  // The library lets what was queued finish first.
  void destroy_stream(void* stream) noexcept override { cudaStreamDestroy(stream_of(stream)); }
  void synchronize_stream(void* stream) override {
    SHARDRUN_CHECK_CUDA(cudaStreamSynchronize(stream_of(stream)));
  }

  void* create_event() override { return create_event(cudaEventDisableTiming); }
  void* create_timed_event() override { return create_event(cudaEventDefault); }
  double seconds_between(void* begin, void* end) override {
    float milliseconds = 0;
    SHARDRUN_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)));
    return milliseconds / 1e3;
  }
  void destroy_event(void* event) noexcept override { cudaEventDestroy(event_of(event)); }
  void record_event(void* event, void* stream) override {
    SHARDRUN_CHECK_CUDA(cudaEventRecord(event_of(event), stream_of(stream)));
  }
  void wait_event(void* stream, void* event) override {
    SHARDRUN_CHECK_CUDA(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
  }
  void synchronize_event(void* event) override {
    SHARDRUN_CHECK_CUDA(cudaEventSynchronize(event_of(event)));
  }
  bool event_done(void* event) override {
    const cudaError_t error = cudaEventQuery(event_of(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    cuda::check(error, "cudaEventQuery");
    return true;
  }

  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    if (bytes == 0) return;
    SHARDRUN_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
  }

 private:
  void* create_event(unsigned flags) {
    make_current();
    cudaEvent_t event = nullptr;
    SHARDRUN_CHECK_CUDA(cudaEventCreateWithFlags(&event, flags));
    return event;
  }

  int index_;
  int least_ = 0, greatest_ = 0;
  DeviceInfo info_;
};

// How many, or why there is none.
struct Visible {
  int count = 0;
  std::string reason;
};

Visible visible() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return {count, ""};
  cudaGetLastError();
  int driver = 0, toolkit = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&toolkit);
  if (driver == 0) return {0, "no NVIDIA driver is loaded"};
  if (error == cudaErrorInsufficientDriver) {
    return {0, fmt::format("the driver is for CUDA {} and older, this build is of CUDA {}; update "
                           "the driver or build with an older toolkit",
                           version_text(driver), version_text(toolkit))};
  }
  if (error == cudaSuccess) return {0, "the driver shows no GPU"};
  return {0, fmt::format("{} ({}; driver for CUDA {}, build of CUDA {})", cudaGetErrorString(error),
                         cudaGetErrorName(error), version_text(driver), version_text(toolkit))};
}

}  // namespace

int cuda_device_count() {
  return visible().count;
}

std::string cuda_unavailable() {
  return visible().reason;
}

std::unique_ptr<Device> make_cuda_device(int index) {
  const Visible gpus = visible();
  if (gpus.count == 0) throw DeviceError("no GPU: {}", gpus.reason);
  if (index < 0 || index >= gpus.count) {
    throw DeviceError("GPU {} was asked for; this process sees {}, numbered from 0", index,
                      gpus.count);
  }
  return std::make_unique<CudaDevice>(index);
}

}  // namespace shardrun
