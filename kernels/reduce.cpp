// Checks, counts, and goes to the table of the device.
#include "kernels/reduce.h"

#include "kernels/arguments.h"
#include "kernels/math/exact.h"

namespace shardrun::kernels {

NonFinite place_of(int64_t found) {
  if (found == kNothingFound) return {};
  const int64_t place = found & (2 * kMaxElements - 1);
  return {found / (2 * kMaxElements), place / 2, place % 2 == 1};
}

int64_t place_tag(int64_t leaf, int64_t first) {
  SHARDRUN_CHECK(leaf >= 0 && leaf < kMaxLeaves, "leaf {}, wanted 0 to {}", leaf, kMaxLeaves - 1);
  SHARDRUN_CHECK(first >= 0 && first <= kMaxElements, "element {}, wanted 0 to {}", first,
                 kMaxElements);
  return leaf * 2 * kMaxElements + 2 * first;
}

void fold(Tensor accumulator, ConstTensor leaf, FoldMode mode, Tensor found, int64_t tag,
          Stream& stream) {
  check_dtype(accumulator, Dtype::fp32, "accumulator");
  check_floating(leaf, "leaf");
  check_numel(leaf, accumulator.numel(), "leaf");
  check_dtype(found, Dtype::int64, "found");
  check_numel(found, 1, "found");
  SHARDRUN_CHECK(place_of(tag).element + leaf.numel() <= kMaxElements,
                 "a leaf of {} elements, wanted at most {}", place_of(tag).element + leaf.numel(),
                 kMaxElements);
  const bool add = mode == FoldMode::add;
  stream.count(add ? static_cast<double>(leaf.numel()) : 0, bytes_of({accumulator, leaf}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().fold(accumulator.as<float>(), in(leaf), add, leaf.numel(),
                              found.as<int64_t>(), tag, queue(stream));
  }
  cpu::table_for(stream).fold(accumulator.as<float>(), in(leaf), add, leaf.numel(),
                              found.as<int64_t>(), tag, stream.pool());
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

// On the CPU by one thread: a thousandth of the step's work, and integers of memory's order.
void add_exact(Tensor limbs, ConstTensor values, Stream& stream) {
  check_dtype(limbs, Dtype::int64, "limbs");
  check_numel(limbs, math::kExactLimbs + 1, "limbs");
  check_dtype(values, Dtype::fp64, "values");
  stream.count(static_cast<double>(values.numel()), bytes_of({values}));
  if (!stream.computes()) return;
  if (on_gpu(stream)) {
    return cuda::table().add_exact(limbs.as<int64_t>(), values.as<double>(), values.numel(),
                                   queue(stream));
  }
  int64_t* limb = limbs.as<int64_t>();
  const double* value = values.as<double>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    const math::ExactParts parts = math::exact_parts(value[i]);
    for (int k = 0; k < 3; ++k) limb[parts.first + k] += parts.part[k];
    limb[math::kExactLimbs] += !parts.finite;
  }
}

}  // namespace shardrun::kernels
