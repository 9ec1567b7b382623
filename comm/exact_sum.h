// Sums of fp64 numbers that do not depend on order: an integer accumulator over the whole range of
// fp64, all-reduced as integers and rounded once. Called for every scalar that crosses shards:
// squares of the norm, losses.
//
//   ExactSum sum;
//   for (double x : mine) sum.add(x);
//   communicator.all_reduce_sum(sum.limbs());
//   double total = sum.value();
//
// Limb i holds an integer that counts 2^(32 i - 1074). It uses 32 bits and has room for 2^30
// additions before carries must move on; they then do by themselves.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/math/exact.h"

namespace shardrun {

class ExactSum {
 public:
  // 2098 bits for one fp64, 30 and more for their number and sign; the last entry counts inputs
  // that were not finite, so that the flag travels with the sum.
  static constexpr int kLimbs = math::kExactLimbs;

  void add(double value);  // infinity and NaN are counted and not added
  void add(const ExactSum& other);
  // What kernels::add_exact made of `additions` values (below 2^30), kLimbs + 1 numbers.
  void add(std::span<const int64_t> limbs, int64_t additions);

  // For all_reduce_sum over at most 2^29 ranks. Carries have moved on: equal sums have equal limbs.
  std::span<int64_t> limbs();

  int64_t non_finite() const { return limbs_[kLimbs]; }  // how many inputs were not finite

  // The sum of the finite inputs, to nearest even; beyond fp64's range infinity, an empty sum is
  // +0.
  double value() const;

 private:
  static constexpr int64_t kHeadroom = int64_t{1} << 30;

  void carry();
  void make_room(int64_t additions);

  std::array<int64_t, kLimbs + 1> limbs_{};
  int64_t additions_ = 0;  // since the last carry; each adds less than 2^32 to a limb
};

}  // namespace shardrun
