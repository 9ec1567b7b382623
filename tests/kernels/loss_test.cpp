// Cross entropy against double, at every level.
#include "kernels/loss.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

struct Size {
  int64_t rows, columns, vocabulary;
};
constexpr Size kShapes[] = {{0, 8, 8},        {1, 1, 1},        {5, 16, 13},
                            {37, 1280, 1250}, {1100, 128, 127}, {3, 5120, 5000}};

struct Result {
  std::vector<Array> arrays;  // loss sum, lse, gradient
  int64_t valid = 0;
};

Result run_all(const Size& s, const Array& logits, const std::vector<int32_t>& targets,
               float scale) {
  Result result;
  const ConstTensor targets_N(targets.data(), Dtype::int32, {s.rows});
  result.arrays = same_everywhere([&](Stream& stream) {
    Array loss(Dtype::fp32, {1}), lse(Dtype::fp32, {s.rows});
    Array gradient(logits.dtype(), {s.rows, s.columns}), inside = logits;
    const Tensor valid(&result.valid, Dtype::int64, {1});
    kernels::cross_entropy_forward(loss.tensor(), valid, lse.tensor(), logits.tensor(), targets_N,
                                   s.vocabulary, stream);
    kernels::cross_entropy_backward(gradient.tensor(), logits.tensor(), lse.tensor(), targets_N,
                                    s.vocabulary, scale, stream);
    kernels::cross_entropy_backward(inside.tensor(), inside.tensor(), lse.tensor(), targets_N,
                                    s.vocabulary, scale, stream);
    EXPECT_TRUE(inside.same_bits(gradient));
    return std::vector<Array>{loss, lse, gradient};
  });
  return result;
}

TEST(CrossEntropy, AgainstDouble) {
  for (Dtype dtype : kFloating) {
    for (const Size& s : kShapes) {
      Array logits = Array::normal(dtype, {s.rows, s.columns}, 1, 4);
      std::vector<int32_t> targets;
      std::mt19937 engine(2);
      for (int64_t r = 0; r < s.rows; ++r) {
        targets.push_back(static_cast<int32_t>(engine() % static_cast<uint32_t>(s.vocabulary)));
        if (r % 5 == 3) targets.back() = kernels::kIgnoreTarget;
        // Padding must not be looked at.
        for (int64_t c = s.vocabulary; c < s.columns; ++c) {
          logits.set(r * s.columns + c, std::numeric_limits<float>::quiet_NaN());
        }
      }
      const float scale = 3.5f;
      const Result got = run_all(s, logits, targets, scale);
      double loss = 0;
      int64_t valid = 0;
      for (int64_t r = 0; r < s.rows; ++r) {
        const int32_t target = targets[static_cast<size_t>(r)];
        double sum = 0;
        for (int64_t c = 0; c < s.vocabulary; ++c) sum += std::exp(logits[r * s.columns + c]);
        const double lse = std::log(sum);
        expect_close(got.arrays[1][r], lse, Dtype::fp32, 1e-6, 4, r);
        if (target >= 0) {
          loss += lse - logits[r * s.columns + target];
          ++valid;
        }
        for (int64_t c = 0; c < s.columns; ++c) {
          const int64_t i = r * s.columns + c;
          double want = 0;
          if (target >= 0 && c < s.vocabulary) {
            want = 3.5 * (std::exp(logits[i] - lse) - (c == target ? 1 : 0));
          }
          expect_close(got.arrays[2][i], want, dtype, 1e-5, 0.5, i);
          if (want == 0) {
            ASSERT_EQ(got.arrays[2][i], 0);
          }
        }
      }
      EXPECT_EQ(got.valid, valid);
      expect_close(got.arrays[0][0], loss, Dtype::fp32, 2e-6, 10, 0);
    }
  }
}

TEST(CrossEntropy, LargeLogitsDoNotOverflow) {
  const Size s{1, 3, 3};
  Array logits(Dtype::fp32, {1, 3});
  logits.set(0, 3e38f);
  logits.set(1, -3e38f);
  logits.set(2, 0);
  const Result got = run_all(s, logits, {0}, 1);
  EXPECT_EQ(got.arrays[0][0], 0);
  EXPECT_EQ(got.arrays[2][0], 0);
}

TEST(CrossEntropy, NanReachesTheLoss) {
  const Size s{2, 40, 40};
  Array logits = Array::normal(Dtype::bf16, {2, 40}, 1);
  logits.set(50, std::numeric_limits<float>::quiet_NaN());
  const Result got = run_all(s, logits, {0, 1}, 1);
  EXPECT_TRUE(std::isnan(got.arrays[0][0]));
  EXPECT_FALSE(std::isnan(got.arrays[1][0]));
}

TEST(CrossEntropy, RefusesTargetsOutsideTheVocabulary) {
  const Size s{1, 8, 5};
  EXPECT_THROW(run_all(s, Array(Dtype::fp32, {1, 8}), {5}, 1), Error);
  EXPECT_THROW(run_all(s, Array(Dtype::fp32, {1, 8}), {-2}, 1), Error);
}

}  // namespace
}  // namespace shardrun
