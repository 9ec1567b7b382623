// AdamW against double, its ranges, and the three forms of parameters.
#include "kernels/adamw.h"

#include <gtest/gtest.h>

#include "kernels/math/philox.h"
#include "tests/kernels/levels.h"

namespace shardrun {
namespace {

using kernels::adamw;
using kernels::AdamwRange;
using kernels::AdamwScalars;

// A slice with gaps: padding at 300 .. 511 and at the end; the last range starts inside its
// parameter.
constexpr int64_t kSize = 70001;
const std::vector<AdamwRange> kRanges = {
    {0, 300, 1.0f, 0.1f, {11, 1, 0}, 0},
    {512, 33000, 0.5f, 0.0f, {12, 1, 0}, 0},
    {33000, 70000, 2.0f, 0.01f, {13, 1, 0}, 777},
};

const AdamwRange* range_of(int64_t i) {
  for (const AdamwRange& range : kRanges) {
    if (range.begin <= i && i < range.end) return &range;
  }
  return nullptr;
}

struct Case {
  Array master, compute, moment1, moment2, gradient;
  explicit Case(Dtype dtype)
      : master(Array::normal(Dtype::fp32, {kSize}, 1)),
        compute(dtype == Dtype::fp32 ? Dtype::bf16 : dtype, {kSize}),
        moment1(Array::normal(Dtype::fp32, {kSize}, 2, 0.1f)),
        moment2(Array::normal(Dtype::fp32, {kSize}, 3, 0.1f)),
        gradient(Array::normal(Dtype::fp32, {kSize}, 4)) {
    for (int64_t i = 0; i < kSize; ++i) {
      moment2.set(i, static_cast<float>(moment2[i] * moment2[i]));
      if (range_of(i)) continue;
      for (Array* a : {&master, &moment1, &moment2, &gradient}) a->set(i, 0);
    }
    for (int64_t i = 0; i < kSize; ++i) compute.set(i, static_cast<float>(master[i]));
  }
};

AdamwScalars scalars() {
  AdamwScalars s;
  s.lr = 1e-2;
  s.t = 3;
  s.gradient_factor = 1.0 / 7;
  return s;
}

struct Updated {
  double p, m, v;
};
Updated reference(double p, double m, double v, double gradient, const AdamwRange& range) {
  const AdamwScalars s = scalars();
  const double g = gradient * s.gradient_factor, t = static_cast<double>(s.t);
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const double update =
      m / (1 - std::pow(s.beta1, t)) / (std::sqrt(v / (1 - std::pow(s.beta2, t))) + s.eps);
  const double decay = static_cast<double>(range.weight_decay);
  p -= s.lr * static_cast<double>(range.lr_factor) * (update + decay * p);
  return {p, m, v};
}

TEST(Adamw, WithMaster) {
  for (Dtype dtype : kFloating) {
    const Case start(dtype);
    const std::vector<Array> got = same_everywhere([&](Stream& stream) {
      Case now = start;
      adamw(now.master.tensor(), dtype == Dtype::fp32 ? Tensor() : now.compute.tensor(),
            now.moment1.tensor(), now.moment2.tensor(), now.gradient.tensor(), scalars(), kRanges,
            stream);
      return std::vector<Array>{now.master, now.moment1, now.moment2, now.compute};
    });
    for (int64_t i = 0; i < kSize; ++i) {
      const AdamwRange* range = range_of(i);
      if (!range) {
        for (const Array& a : got) ASSERT_EQ(a[i], 0) << "padding at " << i;
        continue;
      }
      const Updated want =
          reference(start.master[i], start.moment1[i], start.moment2[i], start.gradient[i], *range);
      // Parameter and step may cancel: their sizes bound the error, not that of the result.
      const double size = std::abs(start.master[i]) + std::abs(want.p - start.master[i]);
      expect_close(got[0][i], want.p, Dtype::fp32, 4e-7, size, i);
      expect_close(got[1][i], want.m, Dtype::fp32, 2e-7, 1, i);
      expect_close(got[2][i], want.v, Dtype::fp32, 4e-7, 0, i);
      if (dtype == Dtype::fp32) continue;
      Array rounded(dtype, {1});
      rounded.set(0, static_cast<float>(got[0][i]));
      ASSERT_EQ(got[3][i], rounded[0]);
    }
  }
}

TEST(Adamw, WithoutMasterRoundsByTheDrawsOfModelSpace) {
  const Case start(Dtype::bf16);
  const std::vector<Array> got = same_everywhere([&](Stream& stream) {
    Case now = start;
    adamw(Tensor(), now.compute.tensor(), now.moment1.tensor(), now.moment2.tensor(),
          now.gradient.tensor(), scalars(), kRanges, stream);
    return std::vector<Array>{now.compute};
  });
  // The same update with the widened parameter as master gives the number before rounding.
  Runner run;
  Case exact = start;
  for (int64_t i = 0; i < kSize; ++i) exact.master.set(i, static_cast<float>(start.compute[i]));
  adamw(exact.master.tensor(), Tensor(), exact.moment1.tensor(), exact.moment2.tensor(),
        exact.gradient.tensor(), scalars(), kRanges, run.stream());
  double bias = 0, count = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    const AdamwRange* range = range_of(i);
    if (!range) {
      ASSERT_EQ(got[0][i], 0);
      continue;
    }
    const float p = exact.master.tensor().as<float>()[i];
    const uint32_t draw =
        math::draw(range->key, static_cast<uint64_t>(range->model_begin + i - range->begin));
    ASSERT_EQ(got[0][i], static_cast<double>(math::widen(math::narrow_stochastic(p, draw)))) << i;
    // In units of the distance of the two neighbours.
    const double step = std::ldexp(1.0, std::ilogb(p) - 7);
    bias += (got[0][i] - static_cast<double>(p)) / step;
    ++count;
  }
  // The error lies in (-1, 1) with a variance of at most 1/4: five standard deviations of the mean.
  EXPECT_LE(std::abs(bias / count), 5 * 0.5 / std::sqrt(count));
}

TEST(Adamw, SlicesGiveTheBitsOfTheWhole) {
  const Case start(Dtype::bf16);
  Runner run;
  Case whole = start, cut = start;
  adamw(Tensor(), whole.compute.tensor(), whole.moment1.tensor(), whole.moment2.tensor(),
        whole.gradient.tensor(), scalars(), kRanges, run.stream());
  for (int64_t begin = 0; begin < kSize; begin += 10007) {
    const int64_t end = std::min(kSize, begin + 10007);
    std::vector<AdamwRange> ranges;
    for (AdamwRange range : kRanges) {
      const int64_t first = std::max(begin, range.begin), last = std::min(end, range.end);
      if (first >= last) continue;
      range.model_begin += first - range.begin;
      range.begin = first - begin;
      range.end = last - begin;
      ranges.push_back(range);
    }
    auto slice = [&](Array& a) { return a.tensor().flat(begin, end - begin); };
    adamw(Tensor(), slice(cut.compute), slice(cut.moment1), slice(cut.moment2), slice(cut.gradient),
          scalars(), ranges, run.stream());
  }
  EXPECT_TRUE(cut.compute.same_bits(whole.compute));
  EXPECT_TRUE(cut.moment2.same_bits(whole.moment2));
}

TEST(Adamw, RefusesRangesThatOverlap) {
  Runner run;
  Case c(Dtype::bf16);
  const std::vector<AdamwRange> ranges = {{0, 10, 1, 0, {}, 0}, {9, 20, 1, 0, {}, 0}};
  EXPECT_THROW(adamw(c.master.tensor(), c.compute.tensor(), c.moment1.tensor(), c.moment2.tensor(),
                     c.gradient.tensor(), scalars(), ranges, run.stream()),
               Error);
}

}  // namespace
}  // namespace shardrun
