// Folding leaves and squares of blocks.
#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

using kernels::fold;
using kernels::FoldMode;
using kernels::NonFinite;

TEST(Fold, AssignsThenAdds) {
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const Array a = Array::normal(dtype, {n}, 1), b = Array::normal(dtype, {n}, 2);
      const std::vector<Array> got = same_everywhere([&](Stream& stream) {
        Array sum(Dtype::fp32, {n});
        EXPECT_EQ(fold(sum.tensor(), a.tensor(), FoldMode::assign, stream).index, -1);
        EXPECT_EQ(fold(sum.tensor(), b.tensor(), FoldMode::add, stream).index, -1);
        return std::vector<Array>{sum};
      });
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(static_cast<float>(got[0][i]),
                  static_cast<float>(a[i]) + static_cast<float>(b[i]));
      }
    }
  }
}

TEST(Fold, FindsTheFirstPlaceThatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Dtype dtype : kFloating) {
    for (FoldMode mode : {FoldMode::assign, FoldMode::add}) {
      for (int64_t at : {0, 1, 1023, 32767, 32768, 70000}) {
        for (float bad : {infinity, -infinity, nan}) {
          Array leaf = Array::normal(dtype, {70001}, 1);
          leaf.set(70000, nan);
          leaf.set(at, bad);
          same_everywhere([&](Stream& stream) {
            Array sum(Dtype::fp32, {70001});
            const NonFinite found = fold(sum.tensor(), leaf.tensor(), mode, stream);
            EXPECT_EQ(found.index, at);
            EXPECT_EQ(found.nan, std::isnan(bad));
            return std::vector<Array>{sum};
          });
        }
      }
    }
  }
}

TEST(Fold, FindsSumsThatOverflow) {
  Runner run;
  Array sum(Dtype::fp32, {300}), leaf(Dtype::fp32, {300});
  sum.set(299, 3e38f);
  leaf.set(299, 3e38f);
  const NonFinite found = fold(sum.tensor(), leaf.tensor(), FoldMode::add, run.stream());
  EXPECT_EQ(found.index, 299);
  EXPECT_FALSE(found.nan);
}

TEST(Fold, FlushesDenormals) {
  Array leaf(Dtype::fp32, {40});
  const uint32_t denormal = 0x80000123u;
  for (int64_t i = 0; i < 40; ++i) {
    std::memcpy(leaf.tensor().as<float>() + i, &denormal, sizeof denormal);
  }
  for (FoldMode mode : {FoldMode::assign, FoldMode::add}) {
    const std::vector<Array> got = same_everywhere([&](Stream& stream) {
      Array sum(Dtype::fp32, {40});
      fold(sum.tensor(), leaf.tensor(), mode, stream);
      return std::vector<Array>{sum};
    });
    uint32_t bits = 0;
    std::memcpy(&bits, got[0].tensor().as<float>(), sizeof bits);
    EXPECT_EQ(bits & 0x7fffffffu, 0u);
  }
}

TEST(BlockSquares, AreExactSquaresInLaneOrder) {
  for (int64_t blocks : {0, 1, 3, 200}) {
    const Array gradient = Array::normal(Dtype::fp32, {blocks * 256}, 1, 1e20f);
    std::vector<double> first;
    same_everywhere([&](Stream& stream) {
      std::vector<double> squares(static_cast<size_t>(blocks) + 1);
      kernels::block_squares(Tensor(squares.data(), Dtype::fp64, {blocks}), gradient.tensor(),
                             stream);
      if (first.empty()) first = squares;
      EXPECT_EQ(first, squares);
      return std::vector<Array>{};
    });
    for (int64_t b = 0; b < blocks; ++b) {
      double lanes[32] = {};
      for (int64_t i = 0; i < 256; ++i) lanes[i % 32] += std::pow(gradient[b * 256 + i], 2);
      for (int d = 16; d > 0; d /= 2) {
        for (int j = 0; j < d; ++j) lanes[j] += lanes[j + d];
      }
      EXPECT_EQ(first[static_cast<size_t>(b)], lanes[0]);
    }
  }
}

}  // namespace
}  // namespace shardrun
