// Checks, counts, and goes to the table of the device.
#include "kernels/elementwise.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

namespace {

double elements(ConstTensor t) {
  return static_cast<double>(t.numel());
}

}  // namespace

void fill(Tensor y, float value, Stream& stream) {
  check_floating(y, "out");
  stream.count(0, bytes_of({y}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().fill(out(y), value, y.numel(), queue(stream));
  }
  cpu::table_for(stream).fill(out(y), value, y.numel(), stream.pool());
}

void copy_bytes(Tensor y, ConstTensor x, Stream& stream) {
  SHARDRUN_CHECK(y.present() && x.present(), "copy: a tensor is absent");
  check_dtype(y, x.dtype(), "out");
  check_numel(y, x.numel(), "out");
  stream.count(0, bytes_of({y, x}));
  if (!stream.computes() || y.data() == x.data()) return;
  if (on_gpu(stream)) {
    return cuda::table().copy_bytes(y.data(), x.data(), static_cast<int64_t>(x.bytes()),
                                    queue(stream));
  }
  cpu::table_for(stream).copy_bytes(y.data(), x.data(), static_cast<int64_t>(x.bytes()),
                                    stream.pool());
}

void cast(Tensor y, ConstTensor x, Stream& stream) {
  check_floating(y, "out");
  check_floating(x, "in");
  check_numel(y, x.numel(), "out");
  stream.count(0, bytes_of({y, x}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().cast(out(y), in(x), x.numel(), queue(stream));
  }
  cpu::table_for(stream).cast(out(y), in(x), x.numel(), stream.pool());
}

void add(Tensor y, ConstTensor a, ConstTensor b, Stream& stream) {
  check_floating(y, "out");
  check_floating(a, "a");
  check_floating(b, "b");
  check_numel(y, a.numel(), "out");
  check_numel(b, a.numel(), "b");
  stream.count(elements(a), bytes_of({y, a, b}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().add(out(y), in(a), in(b), a.numel(), queue(stream));
  }
  cpu::table_for(stream).add(out(y), in(a), in(b), a.numel(), stream.pool());
}

void gelu_forward(Tensor y, ConstTensor x, Stream& stream) {
  check_floating(y, "out");
  check_floating(x, "x");
  check_numel(y, x.numel(), "out");
  stream.count(25 * elements(x), bytes_of({y, x}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().gelu_forward(out(y), in(x), x.numel(), queue(stream));
  }
  cpu::table_for(stream).gelu_forward(out(y), in(x), x.numel(), stream.pool());
}

void gelu_backward(Tensor dx, ConstTensor dy, ConstTensor x, Stream& stream) {
  check_floating(dx, "dx");
  check_floating(dy, "dy");
  check_floating(x, "x");
  check_numel(dx, x.numel(), "dx");
  check_numel(dy, x.numel(), "dy");
  stream.count(34 * elements(x), bytes_of({dx, dy, x}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().gelu_backward(out(dx), in(dy), in(x), x.numel(), queue(stream));
  }
  cpu::table_for(stream).gelu_backward(out(dx), in(dy), in(x), x.numel(), stream.pool());
}

void dropout(Tensor y, ConstTensor x, float p, RandomKey key, Stream& stream) {
  check_floating(y, "out");
  check_floating(x, "x");
  check_numel(y, x.numel(), "out");
  SHARDRUN_CHECK(p >= 0 && p < 1, "dropout: got p = {}, wanted 0 <= p < 1", p);
  stream.count(elements(x), bytes_of({y, x}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().dropout(out(y), in(x), p, key, x.numel(), queue(stream));
  }
  cpu::table_for(stream).dropout(out(y), in(x), p, key, x.numel(), stream.pool());
}

void random_normal(Tensor y, float mean, float std, RandomKey key, int64_t first, Stream& stream) {
  check_floating(y, "out");
  stream.count(60 * elements(y), bytes_of({y}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().random_normal(out(y), mean, std, key, first, y.numel(), queue(stream));
  }
  cpu::table_for(stream).random_normal(out(y), mean, std, key, first, y.numel(), stream.pool());
}

}  // namespace shardrun::kernels
