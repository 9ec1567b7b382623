// A Device whose memory is the host's and whose streams finish at once: enough to hand a kernel's
// host code a Stream with a workspace. The workspace is exactly as large as asked for (the address
// sanitizer sees past its end) and full of NaN.
#pragma once

#include <cstdlib>
#include <cstring>

#include "runtime/device.h"

namespace shardrun {

class HostDevice : public Device {
 public:
  int index() const override { return 0; }
  void make_current() override {}
  const DeviceInfo& info() const override { return info_; }
  size_t free_bytes() const override { return size_t{1} << 40; }
  void* allocate(size_t bytes, const char*) override {
    if (bytes == 0) return nullptr;
    void* data = nullptr;
    if (posix_memalign(&data, 256, bytes) != 0) throw DeviceError("no memory");
    return std::memset(data, 0xff, bytes);
  }
  void free(void* data) noexcept override { std::free(data); }
  void* allocate_host(size_t bytes, const char* what) override { return allocate(bytes, what); }
  void free_host(void* data) noexcept override { std::free(data); }
  void* create_stream(Priority) override { return nullptr; }
  void destroy_stream(void*) noexcept override {}
  void synchronize_stream(void*) override {}
  void* create_event() override { return nullptr; }
  void destroy_event(void*) noexcept override {}
  void record_event(void*, void*) override {}
  void wait_event(void*, void*) override {}
  void synchronize_event(void*) override {}
  bool event_done(void*) override { return true; }
  void* create_timed_event() override { return nullptr; }
  double seconds_between(void*, void*) override { return 0; }
  void copy(void* to, const void* from, size_t bytes, void*) override {
    std::memcpy(to, from, bytes);
  }

 private:
  DeviceInfo info_;
};

}  // namespace shardrun
