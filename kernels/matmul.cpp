// The public matrix product: checks, counts, and hands over to the device. Called by the ops.
#include "kernels/matmul.h"

#include "kernels/arguments.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/onednn.h"

namespace shardrun::kernels {
namespace {

bool is_compute(Dtype dtype) {
  return dtype == Dtype::fp32 || dtype == Dtype::bf16 || dtype == Dtype::fp16;
}

}  // namespace

std::string matmul_library(DeviceKind kind) {
  return kind == DeviceKind::cuda ? cuda::table().matmul_library() : cpu::onednn_version();
}

void matmul(Tensor c, ConstTensor a, Transpose transpose_a, ConstTensor b, Transpose transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream) {
  SHARDRUN_CHECK(c.present() && a.present() && b.present(), "matmul: c, a or b is absent");
  const bool ta = transpose_a == Transpose::yes, tb = transpose_b == Transpose::yes;
  const Shape &as = a.shape(), &bs = b.shape(), &cs = c.shape();
  const int64_t m = ta ? as.columns() : as.rows(), k = ta ? as.rows() : as.columns();
  const int64_t n = tb ? bs.rows() : bs.columns(), k_b = tb ? bs.columns() : bs.rows();
  SHARDRUN_CHECK(k == k_b && cs.rows() == m && cs.columns() == n, "matmul: {} = {}{} x {}{}",
                 cs.text(), as.text(), ta ? "^T" : "", bs.text(), tb ? "^T" : "");
  SHARDRUN_CHECK(is_compute(a.dtype()) && a.dtype() == b.dtype(), "matmul: a is {}, b is {}",
                 name_of(a.dtype()), name_of(b.dtype()));
  SHARDRUN_CHECK(c.dtype() == a.dtype() || c.dtype() == Dtype::fp32,
                 "matmul: c is {}, wanted {} or fp32", name_of(c.dtype()), name_of(a.dtype()));
  SHARDRUN_CHECK(!accumulate || c.dtype() == Dtype::fp32,
                 "matmul: accumulating into {}, wanted fp32", name_of(c.dtype()));
  if (bias.present()) {
    SHARDRUN_CHECK(is_compute(bias.dtype()) && bias.numel() == n,
                   "matmul: bias is {} {}, wanted {} elements", name_of(bias.dtype()),
                   bias.shape().text(), n);
  }
  stream.count(2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
               static_cast<double>(a.bytes() + b.bytes() + bias.bytes()) +
                   static_cast<double>(c.bytes()) * (accumulate ? 2 : 1));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().matmul(c, a, ta, b, tb, bias, accumulate, stream);
  }
  cpu::matmul(c, a, ta, b, tb, bias, accumulate, stream);
}

}  // namespace shardrun::kernels
