#include "runtime/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace shardrun {

// ---- events

void Event::record(Stream& stream) {
  Device* device = stream.device();
  if (!device) return;
  if (!handle_) {
    handle_ = device->create_event();
    device_ = device;
  }
  device->record_event(handle_, stream.handle());
}

void Event::wait_on(Stream& stream) const {
  if (handle_) device_->wait_event(stream.handle(), handle_);
}

void Event::synchronize() const {
  if (handle_) device_->synchronize_event(handle_);
}

bool Event::done() const {
  return !handle_ || device_->event_done(handle_);
}

void Event::reset() {
  if (handle_) device_->destroy_event(handle_);
  handle_ = nullptr;
}

// ---- host memory

HostBuffer::HostBuffer(Device* device, size_t bytes, const char* what)
    : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  if (device) {
    data_ = static_cast<std::byte*>(device->allocate_host(bytes, what));
    return;
  }
  data_ = static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  if (!data_) throw DeviceError("{} bytes of host memory for {}: not there", bytes, what);
}

HostBuffer::~HostBuffer() {
  if (device_ && data_) {
    device_->free_host(data_);
  } else {
    std::free(data_);
  }
}

// ---- copies

static void copy(void* to, const void* from, size_t bytes, Stream& stream) {
  if (!stream.computes() || bytes == 0) return;
  if (stream.device()) {
    stream.device()->copy(to, from, bytes, stream.handle());
  } else {
    std::memcpy(to, from, bytes);
  }
}

void copy_to_host(void* host, ConstTensor tensor, Stream& stream) {
  copy(host, tensor.data(), tensor.bytes(), stream);
}

void copy_from_host(Tensor tensor, const void* host, Stream& stream) {
  copy(tensor.data(), host, tensor.bytes(), stream);
}

void fill_from_host(Tensor tensor, Stream& stream,
                    FunctionRef<void(int64_t begin, Tensor out)> write) {
  if (!stream.device()) return write(0, tensor);
  constexpr size_t kPiece = size_t{4} << 20;
  const HostBuffer piece(stream.device(), std::min(kPiece, tensor.bytes()), "pieces of a tensor");
  const int64_t most = static_cast<int64_t>(kPiece / size_of(tensor.dtype()));
  for (int64_t begin = 0; begin < tensor.numel(); begin += most) {
    const int64_t count = std::min(most, tensor.numel() - begin);
    write(begin, Tensor(piece.data(), tensor.dtype(), Shape{count}));
    copy_from_host(tensor.flat(begin, count), piece.data(), stream);
    stream.synchronize();
  }
}

HostView::HostView(ConstTensor tensor, Stream& stream)
    : data_(static_cast<const std::byte*>(tensor.data())) {
  if (!stream.device() || tensor.bytes() == 0) return;
  copy_ = HostBuffer(stream.device(), tensor.bytes(), "a look at a tensor");
  copy_to_host(copy_.data(), tensor, stream);
  stream.synchronize();
  data_ = copy_.data();
}

// ---- streams of a GPU

Stream::Stream(Device& device, size_t workspace_bytes, Priority priority)
    : kind_(DeviceKind::cuda),
      isa_(Isa::baseline),
      pool_(nullptr),
      device_(&device),
      handle_(device.create_stream(priority)),
      workspace_bytes_(workspace_bytes) {
  try {
    workspace_ = device.allocate(workspace_bytes, "the workspace of kernels");
  } catch (...) {
    device.destroy_stream(handle_);
    throw;
  }
}

Stream::~Stream() {
  if (!device_) return;
  matmul_state_.reset();
  device_->free(workspace_);
  device_->destroy_stream(handle_);
}

void Stream::synchronize() {
  if (device_) device_->synchronize_stream(handle_);
}

void* Stream::workspace(size_t bytes) const {
  if (bytes > workspace_bytes_) {
    throw DeviceError("a kernel wants {} bytes of workspace, there are {}; raise --workspace",
                      bytes, workspace_bytes_);
  }
  return workspace_;
}

}  // namespace shardrun
