// Checks, counts, and goes to the table of the device.
#include "kernels/reduce.h"

#include "kernels/arguments.h"

namespace shardrun::kernels {

NonFinite fold(Tensor accumulator, ConstTensor leaf, FoldMode mode, Stream& stream) {
  check_dtype(accumulator, Dtype::fp32, "accumulator");
  check_floating(leaf, "leaf");
  check_numel(leaf, accumulator.numel(), "leaf");
  const bool add = mode == FoldMode::add;
  stream.count(add ? static_cast<double>(leaf.numel()) : 0, bytes_of({accumulator, leaf}));
  if (!stream.computes()) return {};
  const int64_t found = cpu::table_for(stream).fold(accumulator.as<float>(), in(leaf), add,
                                                    leaf.numel(), stream.pool());
  if (found == INT64_MAX) return {};
  return {found / 2, found % 2 == 1};
}

void block_squares(Tensor squares, ConstTensor gradient, Stream& stream) {
  check_dtype(squares, Dtype::fp64, "squares");
  check_dtype(gradient, Dtype::fp32, "gradient");
  SHARDRUN_CHECK(gradient.numel() % 256 == 0, "gradient: got {} elements, wanted a multiple of 256",
                 gradient.numel());
  check_numel(squares, gradient.numel() / 256, "squares");
  stream.count(2 * static_cast<double>(gradient.numel()), bytes_of({squares, gradient}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().block_squares(squares.as<double>(), gradient.as<float>(), squares.numel(),
                                       queue(stream));
  }
  cpu::table_for(stream).block_squares(squares.as<double>(), gradient.as<float>(), squares.numel(),
                                       stream.pool());
}

}  // namespace shardrun::kernels
