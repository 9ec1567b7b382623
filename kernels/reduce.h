// The arithmetic of reductions over ranks: folding one leaf into an accumulator, squares for the norm.
#pragma once

#include <cstdint>

#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun::kernels {

enum class FoldMode : bool { assign, add };

// [Note: places] Where a leaf, or the sum with it, first was not finite, as one integer that stays on
// the device until the step's decision: (leaf << 40) + 2 x element + (1 when NaN). The smallest one
// is the first leaf's first element, whatever the order in which threads find theirs.
inline constexpr int64_t kNothingFound = INT64_MAX;
inline constexpr int64_t kMaxLeaves = int64_t{1} << 22;
inline constexpr int64_t kMaxElements = int64_t{1} << 39;

struct NonFinite {
  int64_t leaf = -1;  // -1: all finite
  int64_t element = -1;
  bool nan = false;  // else infinity
};
NonFinite place_of(int64_t found);
// What fold() adds to 2 x index: of element `first` of a leaf, which index 0 is.
int64_t place_tag(int64_t leaf, int64_t first);

// accumulator[i] = leaf[i], or accumulator[i] + leaf[i]: fp32 [n], leaf in the wire dtype [n]. `found`
// (int64 [1], on the device) becomes min(found, tag + 2 i + (1 when NaN)) over all i where the leaf or
// the new sum is not finite; the kind is the leaf's where the leaf is to blame, else the sum's. n is
// a multiple of 256 or any number.
void fold(Tensor accumulator, ConstTensor leaf, FoldMode mode, Tensor found, int64_t tag,
          Stream& stream);

// squares (fp64 [n / 256]): for each block of 256 elements of `gradient` (fp32 [n], n a multiple of
// 256) the sum of squares, each exact in fp64, added in 32 lanes (element i to lane i mod 32, in order
// of i), then over lanes with distances 16, 8, 4, 2, 1.
void block_squares(Tensor squares, ConstTensor gradient, Stream& stream);

// limbs (int64 [kExactLimbs + 1], kernels/math/exact.h) += each of `values` (fp64 [n]), as integers: the
// same in any order. ExactSum::add() takes the limbs in. Less than 2^30 values before that.
void add_exact(Tensor limbs, ConstTensor values, Stream& stream);

}  // namespace shardrun::kernels
