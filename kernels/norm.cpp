// Checks, counts, and goes to the table of the device.
#include "kernels/norm.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

void layer_norm_forward(Tensor y, Tensor mean, Tensor rstd, ConstTensor x, ConstTensor weight,
                        ConstTensor bias, float eps, Stream& stream) {
  const int64_t rows = x.shape().rows(), columns = x.shape().columns();
  check_floating(y, "y");
  check_floating(x, "x");
  check_floating(weight, "weight");
  check_dtype(mean, Dtype::fp32, "mean");
  check_dtype(rstd, Dtype::fp32, "rstd");
  check_numel(y, x.numel(), "y");
  check_numel(mean, rows, "mean");
  check_numel(rstd, rows, "rstd");
  check_numel(weight, columns, "weight");
  if (bias) {
    check_floating(bias, "bias");
    check_numel(bias, columns, "bias");
  }
  stream.count(8 * static_cast<double>(x.numel()), bytes_of({y, mean, rstd, x, weight, bias}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().layer_norm_forward(out(y), mean.as<float>(), rstd.as<float>(), in(x),
                                            in(weight), in(bias), eps, rows, columns,
                                            queue(stream));
  }
  cpu::table_for(stream).layer_norm_forward(out(y), mean.as<float>(), rstd.as<float>(), in(x),
                                            in(weight), in(bias), eps, rows, columns,
                                            stream.pool());
}

void layer_norm_backward(Tensor dx, Tensor dweight, Tensor dbias, ConstTensor dy, ConstTensor x,
                         ConstTensor weight, ConstTensor mean, ConstTensor rstd,
                         bool accumulate_weight, bool accumulate_bias, Stream& stream) {
  const int64_t rows = x.shape().rows(), columns = x.shape().columns();
  check_floating(dx, "dx");
  check_floating(dy, "dy");
  check_floating(x, "x");
  check_floating(weight, "weight");
  check_dtype(dweight, Dtype::fp32, "dweight");
  check_dtype(mean, Dtype::fp32, "mean");
  check_dtype(rstd, Dtype::fp32, "rstd");
  check_numel(dx, x.numel(), "dx");
  check_numel(dy, x.numel(), "dy");
  check_numel(weight, columns, "weight");
  check_numel(dweight, columns, "dweight");
  check_numel(mean, rows, "mean");
  check_numel(rstd, rows, "rstd");
  if (dbias) {
    check_dtype(dbias, Dtype::fp32, "dbias");
    check_numel(dbias, columns, "dbias");
  }
  stream.count(16 * static_cast<double>(x.numel()),
               bytes_of({dx, dweight, dbias, dy, x, weight, mean, rstd}));
  if (!stream.computes()) return;
  const LayerNormGradients gradients{out(dx), dweight.as<float>(),
                                     dbias ? dbias.as<float>() : nullptr, accumulate_weight,
                                     accumulate_bias};
  if (on_gpu(stream)) {
    return cuda::table().layer_norm_backward(
        gradients, in(dy), in(x), in(weight), mean.as<float>(), rstd.as<float>(), rows, columns,
        stream.workspace(cuda::table().layer_norm_backward_workspace(rows, columns)),
        queue(stream));
  }
  cpu::table_for(stream).layer_norm_backward(gradients, in(dy), in(x), in(weight), mean.as<float>(),
                                             rstd.as<float>(), rows, columns, stream.pool());
}

void column_sum(Tensor sum, ConstTensor x, bool accumulate, Stream& stream) {
  check_dtype(sum, Dtype::fp32, "out");
  check_floating(x, "in");
  check_numel(sum, x.shape().columns(), "out");
  stream.count(static_cast<double>(x.numel()), bytes_of({sum, x}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().column_sum(
        sum.as<float>(), in(x), accumulate, x.shape().rows(), x.shape().columns(),
        stream.workspace(cuda::table().column_sum_workspace(x.shape().rows(), x.shape().columns())),
        queue(stream));
  }
  cpu::table_for(stream).column_sum(sum.as<float>(), in(x), accumulate, x.shape().rows(),
                                    x.shape().columns(), stream.pool());
}

}  // namespace shardrun::kernels
