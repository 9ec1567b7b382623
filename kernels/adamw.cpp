// Checks, counts, and goes to the table of the device.
#include "kernels/adamw.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

void adamw(Tensor master, Tensor compute, Tensor moment1, Tensor moment2, ConstTensor gradient,
           const AdamwScalars& scalars, std::span<const AdamwRange> ranges, Stream& stream) {
  const int64_t n = gradient.numel();
  check_dtype(gradient, Dtype::fp32, "gradient");
  check_dtype(moment1, Dtype::fp32, "moment1");
  check_dtype(moment2, Dtype::fp32, "moment2");
  check_numel(moment1, n, "moment1");
  check_numel(moment2, n, "moment2");
  if (master) {
    check_dtype(master, Dtype::fp32, "master");
    check_numel(master, n, "master");
    SHARDRUN_CHECK(!compute || compute.dtype() == Dtype::bf16 || compute.dtype() == Dtype::fp16,
                   "compute: got {}, wanted bf16 or fp16", name_of(compute.dtype()));
  } else {
    check_dtype(compute, Dtype::bf16, "compute without a master");
  }
  if (compute) check_numel(compute, n, "compute");
  SHARDRUN_CHECK(scalars.t >= 1, "t: got {}, wanted >= 1", scalars.t);
  int64_t updated = 0, previous_end = 0;
  for (const AdamwRange& range : ranges) {
    SHARDRUN_CHECK(previous_end <= range.begin && range.begin <= range.end && range.end <= n,
                   "ranges: got [{}, {}) after {}, wanted sorted ranges inside {} elements",
                   range.begin, range.end, previous_end, n);
    updated += range.end - range.begin;
    previous_end = range.end;
  }
  // Parameter and moments are read and written; with a master the compute copy is only written.
  stream.count(16 * static_cast<double>(updated),
               bytes_of({master, master, compute, moment1, moment1, moment2, moment2, gradient}) +
                   (master ? 0 : bytes_of({compute})));
  if (!stream.computes()) return;
  const AdamwArguments arguments{master ? master.as<float>() : nullptr,
                                 out(compute),
                                 moment1.as<float>(),
                                 moment2.as<float>(),
                                 gradient.as<float>(),
                                 &scalars,
                                 ranges.data(),
                                 static_cast<int64_t>(ranges.size())};
  if (on_gpu(stream)) {
    return cuda::table().adamw(arguments, queue(stream));
  }
  cpu::table_for(stream).adamw(arguments, n, stream.pool());
}

}  // namespace shardrun::kernels
