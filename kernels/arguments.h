// Checks of arguments that the public functions share, and their way to the table of the device.
#pragma once

#include "kernels/cpu/table.h"
#include "kernels/cuda/table.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

inline In in(ConstTensor t) {
  return {t.present() ? t.data() : nullptr, t.dtype()};
}
inline Out out(Tensor t) {
  return {t.present() ? t.data() : nullptr, t.dtype()};
}

inline bool on_gpu(const Stream& stream) {
  return stream.kind() == DeviceKind::cuda;
}
inline cuda::StreamHandle queue(const Stream& stream) {
  return static_cast<cuda::StreamHandle>(stream.handle());
}

// fp32, bf16 or fp16: what fp32 arithmetic serves.
inline void check_floating(ConstTensor t, const char* name) {
  SHARDRUN_CHECK(t.present(), "{}: absent, wanted a tensor", name);
  SHARDRUN_CHECK(t.dtype() <= Dtype::fp16 && is_floating(t.dtype()),
                 "{}: got {}, wanted fp32, bf16 or fp16", name, name_of(t.dtype()));
}

inline void check_dtype(ConstTensor t, Dtype dtype, const char* name) {
  SHARDRUN_CHECK(t.present(), "{}: absent, wanted a tensor", name);
  SHARDRUN_CHECK(t.dtype() == dtype, "{}: got {}, wanted {}", name, name_of(t.dtype()),
                 name_of(dtype));
}

inline void check_numel(ConstTensor t, int64_t numel, const char* name) {
  SHARDRUN_CHECK(t.numel() == numel, "{}: got {} with {} elements, wanted {}", name,
                 t.shape().text(), t.numel(), numel);
}

inline double bytes_of(std::initializer_list<ConstTensor> tensors) {
  double bytes = 0;
  for (const ConstTensor& t : tensors) bytes += static_cast<double>(t.bytes());
  return bytes;
}

}  // namespace shardrun::kernels
