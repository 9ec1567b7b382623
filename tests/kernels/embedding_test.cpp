// Embedding against a plain loop in the order that the contract gives: the bits must agree.
#include "kernels/embedding.h"

#include <gtest/gtest.h>

#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

struct Size {
  int64_t batch, time, columns, vocabulary;
};
constexpr Size kShapes[] = {
    {1, 1, 1, 1}, {2, 0, 4, 3}, {3, 7, 31, 5}, {4, 33, 128, 257}, {2, 5, 1500, 40}};

std::vector<int32_t> random_tokens(const Size& s) {
  std::mt19937 engine(3);
  std::vector<int32_t> tokens(static_cast<size_t>(s.batch * s.time));
  for (int32_t& t : tokens)
    t = static_cast<int32_t>(engine() % static_cast<uint32_t>(s.vocabulary));
  return tokens;
}

TEST(Embedding, Forward) {
  for (Dtype dtype : kFloating) {
    for (const Size& s : kShapes) {
      const std::vector<int32_t> tokens = random_tokens(s);
      const ConstTensor tokens_BT(tokens.data(), Dtype::int32, {s.batch, s.time});
      const Array table = Array::normal(dtype, {s.vocabulary, s.columns}, 1);
      const Array positions = Array::normal(dtype, {s.time + 2, s.columns}, 2);
      const std::vector<Array> got = same_everywhere([&](Stream& stream) {
        Array y(dtype, {s.batch, s.time, s.columns}), plain = y;
        kernels::embedding_forward(y.tensor(), tokens_BT, table.tensor(), positions.tensor(),
                                   stream);
        kernels::embedding_forward(plain.tensor(), tokens_BT, table.tensor(), ConstTensor(),
                                   stream);
        return std::vector<Array>{y, plain};
      });
      for (int64_t i = 0; i < s.batch * s.time * s.columns; ++i) {
        const int64_t place = i / s.columns, c = i % s.columns;
        const double row = table[tokens[static_cast<size_t>(place)] * s.columns + c];
        ASSERT_EQ(got[1][i], row);
        Array want(dtype, {1});
        want.set(0, static_cast<float>(row) +
                        static_cast<float>(positions[place % s.time * s.columns + c]));
        ASSERT_EQ(got[0][i], want[0]);
      }
    }
  }
}

TEST(Embedding, Backward) {
  for (Dtype dtype : kFloating) {
    for (const Size& s : kShapes) {
      for (bool accumulate : {false, true}) {
        const std::vector<int32_t> tokens = random_tokens(s);
        const ConstTensor tokens_BT(tokens.data(), Dtype::int32, {s.batch, s.time});
        const Array dy = Array::normal(dtype, {s.batch, s.time, s.columns}, 1);
        const Array before = Array::normal(Dtype::fp32, {s.vocabulary, s.columns}, 2);
        const Array before_positions = Array::normal(Dtype::fp32, {s.time + 2, s.columns}, 3);
        const std::vector<Array> got = same_everywhere([&](Stream& stream) {
          Array dtable = before, dpositions = before_positions;
          kernels::embedding_backward(dtable.tensor(), tokens_BT, dy.tensor(), accumulate, stream);
          kernels::position_backward(dpositions.tensor(), dy.tensor(), accumulate, stream);
          return std::vector<Array>{dtable, dpositions};
        });
        Array want = before, want_positions = before_positions;
        if (!accumulate) {
          want = Array(Dtype::fp32, {s.vocabulary, s.columns});
          want_positions = Array(Dtype::fp32, {s.time + 2, s.columns});
        }
        for (int64_t i = 0; i < s.batch * s.time * s.columns; ++i) {
          const int64_t place = i / s.columns, c = i % s.columns;
          const int64_t at = tokens[static_cast<size_t>(place)] * s.columns + c;
          want.set(at, static_cast<float>(want[at]) + static_cast<float>(dy[i]));
          const int64_t t = place % s.time * s.columns + c;
          want_positions.set(t, static_cast<float>(want_positions[t]) + static_cast<float>(dy[i]));
        }
        EXPECT_TRUE(got[0].same_bits(want));
        EXPECT_TRUE(got[1].same_bits(want_positions));
      }
    }
  }
}

TEST(Embedding, RefusesTokensOutsideTheTable) {
  Runner run;
  const std::vector<int32_t> tokens = {0, 5};
  const Array table(Dtype::fp32, {5, 3});
  Array y(Dtype::fp32, {1, 2, 3});
  EXPECT_THROW(
      kernels::embedding_forward(y.tensor(), ConstTensor(tokens.data(), Dtype::int32, {1, 2}),
                                 table.tensor(), ConstTensor(), run.stream()),
      Error);
}

}  // namespace
}  // namespace shardrun
