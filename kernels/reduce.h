// The arithmetic of reductions over ranks: folding one leaf into an accumulator, squares for the norm.
#pragma once

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

enum class FoldMode : bool { assign, add };

// The first element, in order of index, that is not finite.
struct NonFinite {
  int64_t index = -1;  // -1: all finite
  bool nan = false;    // else infinity
};

// accumulator[i] = leaf[i], or accumulator[i] + leaf[i]: fp32 [n], leaf in the wire dtype [n]. Returns
// the first place where the leaf or the new sum is not finite. n is a multiple of 256 or any number.
NonFinite fold(Tensor accumulator, ConstTensor leaf, FoldMode mode, Stream& stream);

// squares (fp64 [n / 256]): for each block of 256 elements of `gradient` (fp32 [n], n a multiple of
// 256) the sum of squares, each exact in fp64, added in 32 lanes (element i to lane i mod 32, in order
// of i), then over lanes with distances 16, 8, 4, 2, 1.
void block_squares(Tensor squares, ConstTensor gradient, Stream& stream);

}  // namespace shardrun::kernels
