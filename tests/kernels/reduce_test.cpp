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

// A place on the "device", which a fold lowers.
struct Found {
  int64_t place = kernels::kNothingFound;
  Tensor tensor() { return {&place, Dtype::int64, {1}}; }
  NonFinite read() const { return kernels::place_of(place); }
};

TEST(Fold, AssignsThenAdds) {
  for (Dtype dtype : kFloating) {
    for (int64_t n : kSizes) {
      const Array a = Array::normal(dtype, {n}, 1), b = Array::normal(dtype, {n}, 2);
      const std::vector<Array> got = same_everywhere([&](Stream& stream) {
        Array sum(Dtype::fp32, {n});
        Found found;
        fold(sum.tensor(), a.tensor(), FoldMode::assign, found.tensor(), 0, stream);
        fold(sum.tensor(), b.tensor(), FoldMode::add, found.tensor(), 0, stream);
        EXPECT_EQ(found.place, kernels::kNothingFound);
        EXPECT_EQ(found.read().leaf, -1);
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
            Found found;
            const int64_t tag = kernels::place_tag(5, 1000);
            fold(sum.tensor(), leaf.tensor(), mode, found.tensor(), tag, stream);
            EXPECT_EQ(found.read().leaf, 5);
            EXPECT_EQ(found.read().element, 1000 + at);
            EXPECT_EQ(found.read().nan, std::isnan(bad));
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
  Found found;
  fold(sum.tensor(), leaf.tensor(), FoldMode::add, found.tensor(), 0, run.stream());
  EXPECT_EQ(found.read().element, 299);
  EXPECT_FALSE(found.read().nan);
}

// Of many leaves the first, of its elements the first; what a later leaf finds changes nothing.
TEST(Fold, KeepsTheSmallestPlace) {
  Runner run;
  Array sum(Dtype::fp32, {300}), leaf(Dtype::fp32, {300});
  const auto found_after = [&](Found& found, int64_t number, int64_t at, float bad) {
    Array spoilt = leaf;
    spoilt.set(at, bad);
    fold(sum.tensor(), spoilt.tensor(), FoldMode::assign, found.tensor(),
         kernels::place_tag(number, 0), run.stream());
    return found.read();
  };
  Found found;
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(found_after(found, 7, 20, infinity).leaf, 7);
  EXPECT_EQ(found_after(found, 8, 1, infinity).leaf, 7);
  EXPECT_EQ(found_after(found, 7, 21, infinity).element, 20);
  EXPECT_EQ(found_after(found, 7, 19, infinity).element, 19);
  EXPECT_EQ(found_after(found, kernels::kMaxLeaves - 1, 0, infinity).leaf, 7);
  EXPECT_EQ(found_after(found, 0, 299, infinity).element, 299);
  EXPECT_EQ(found.read().leaf, 0);
}

TEST(Fold, PlacesReachTheEdges) {
  const int64_t leaf = kernels::kMaxLeaves - 1, element = kernels::kMaxElements - 1;
  const int64_t tag = kernels::place_tag(leaf, element);
  EXPECT_LT(tag + 1, kernels::kNothingFound);
  EXPECT_EQ(kernels::place_of(tag + 1).leaf, leaf);
  EXPECT_EQ(kernels::place_of(tag + 1).element, element);
  EXPECT_TRUE(kernels::place_of(tag + 1).nan);
  EXPECT_FALSE(kernels::place_of(tag).nan);
  EXPECT_THROW(kernels::place_tag(leaf + 1, 0), InternalError);
  Runner run;
  Array sum(Dtype::fp32, {2});
  Found found;  // the second element would be counted to the next leaf
  EXPECT_THROW(
      fold(sum.tensor(), sum.tensor(), FoldMode::assign, found.tensor(), tag, run.stream()),
      InternalError);
}

TEST(Fold, AnIdleStreamFindsNothing) {
  Runner run;
  Array sum(Dtype::fp32, {8}), leaf(Dtype::fp32, {8});
  leaf.set(3, std::numeric_limits<float>::quiet_NaN());
  Found found;
  run.stream().set_idle(true);
  fold(sum.tensor(), leaf.tensor(), FoldMode::add, found.tensor(), 0, run.stream());
  EXPECT_EQ(found.place, kernels::kNothingFound);
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
      Found found;
      fold(sum.tensor(), leaf.tensor(), mode, found.tensor(), 0, stream);
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
