// Exact sums against integers, long double, and themselves in other orders.
#include "comm/exact_sum.h"

#include "kernels/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace shardrun {

namespace {

constexpr double kMax = std::numeric_limits<double>::max();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kNormal = std::numeric_limits<double>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();

double sum_of(const std::vector<double>& values) {
  ExactSum sum;
  for (double value : values) sum.add(value);
  return sum.value();
}

void expect_bits(double got, double wanted) {
  EXPECT_EQ(std::bit_cast<uint64_t>(got), std::bit_cast<uint64_t>(wanted))
      << std::hexfloat << got << ", wanted " << wanted;
}

// Any finite double, all exponents alike.
double any_double(std::mt19937_64& random) {
  const uint64_t bits = random();
  const uint64_t exponent = random() % 2047;
  return std::bit_cast<double>((bits & ~(uint64_t{0x7ff} << 52)) | exponent << 52);
}

// What the kernel adds up is what add() does, limb for limb.
TEST(ExactSum, TakesInTheLimbsOfTheKernel) {
  std::mt19937_64 random(5);
  std::vector<double> values;
  for (int i = 0; i < 5000; ++i) values.push_back(any_double(random));
  for (double value : {0.0, -0.0, kTiny, -kTiny, kNormal, kMax, -kMax, kInf, -kInf}) {
    values.push_back(value);
  }
  ThreadPool pool(1);
  Stream stream(DeviceKind::cpu, Isa::baseline, &pool);
  ExactSum wanted, got;
  got.add(2.5);
  wanted.add(2.5);
  for (int part = 0; part < 2; ++part) {
    std::vector<int64_t> limbs(ExactSum::kLimbs + 1);
    const int64_t count = static_cast<int64_t>(values.size());
    kernels::add_exact({limbs.data(), Dtype::int64, {ExactSum::kLimbs + 1}},
                       {values.data(), Dtype::fp64, {count}}, stream);
    got.add(limbs, count);
    for (double value : values) wanted.add(value);
  }
  EXPECT_TRUE(std::ranges::equal(got.limbs(), wanted.limbs()));
  EXPECT_EQ(got.non_finite(), 4);
  EXPECT_THROW(got.add(std::vector<int64_t>(ExactSum::kLimbs), 1), InternalError);
}

TEST(ExactSum, OneNumberComesBack) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const double value = any_double(random);
    expect_bits(sum_of({value}), value == 0 ? 0.0 : value);
  }
  for (double value : {kMax, -kMax, kTiny, -kTiny, kNormal, kNormal - kTiny, 1.0, -1.0}) {
    expect_bits(sum_of({value}), value);
  }
  expect_bits(sum_of({}), 0.0);
  expect_bits(sum_of({-0.0}), 0.0);
}

TEST(ExactSum, TwoNumbersRoundLikeTheProcessor) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 50000; ++i) {
    const double a = any_double(random);
    // Near in exponent, so that rounding and cancellation happen.
    const double b = std::ldexp(std::bit_cast<double>(0x3ff0000000000000 | (random() >> 12)),
                                std::ilogb(a) + static_cast<int>(random() % 120) - 60) *
                     (random() & 1 ? 1 : -1);
    if (!std::isfinite(b)) continue;
    expect_bits(sum_of({a, b}), a + b == 0 ? 0.0 : a + b);
  }
}

TEST(ExactSum, RoundsToNearestEven) {
  const double unit = 0x1p-52;
  expect_bits(sum_of({1.0, unit / 2}), 1.0);                        // tie, even stays
  expect_bits(sum_of({1.0 + unit, unit / 2}), 1.0 + 2 * unit);      // tie, odd goes up
  expect_bits(sum_of({1.0, unit / 2, kTiny}), 1.0 + unit);          // just above the tie
  expect_bits(sum_of({1.0 + unit, unit / 2, -kTiny}), 1.0 + unit);  // just below it
  expect_bits(sum_of({-1.0, -unit / 2, -kTiny}), -1.0 - unit);
  expect_bits(sum_of({2.0 - unit, unit / 2}), 2.0);  // carry into the exponent
}

TEST(ExactSum, RangeExtremes) {
  const double half_unit = 0x1p970;  // half of the last place of the largest double
  expect_bits(sum_of({kMax, half_unit}), kInf);
  expect_bits(sum_of({kMax, half_unit, -kTiny}), kMax);
  expect_bits(sum_of({kMax, kMax}), kInf);
  expect_bits(sum_of({-kMax, -kMax}), -kInf);
  expect_bits(sum_of({kMax, kMax, kMax, -kMax, -kMax}), kMax);  // beyond the range and back
  expect_bits(sum_of({kMax, kTiny, -kMax}), kTiny);
  expect_bits(sum_of({kNormal, -kTiny}), kNormal - kTiny);
  expect_bits(sum_of({kNormal - kTiny, kTiny}), kNormal);
  expect_bits(sum_of({kTiny, -2 * kTiny}), -kTiny);
}

TEST(ExactSum, OrderAndGroupingDoNotMatter) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<double> values;
    for (int i = 0; i < 3000; ++i) values.push_back(any_double(random));
    ExactSum whole;
    for (double value : values) whole.add(value);
    const std::vector<int64_t> limbs(whole.limbs().begin(), whole.limbs().end());

    std::shuffle(values.begin(), values.end(), random);
    std::vector<ExactSum> parts(1 + round);
    for (size_t i = 0; i < values.size(); ++i) parts[random() % parts.size()].add(values[i]);
    ExactSum again;
    for (const ExactSum& part : parts) again.add(part);
    EXPECT_TRUE(std::ranges::equal(again.limbs(), limbs));
    expect_bits(again.value(), whole.value());

    for (double value : values) again.add(-value);
    expect_bits(again.value(), 0.0);
    EXPECT_TRUE(std::ranges::all_of(again.limbs(), [](int64_t limb) { return limb == 0; }));
  }
}

TEST(ExactSum, AgreesWithIntegers) {
  std::mt19937_64 random(4);
  __int128 wanted = 0;
  ExactSum sum;
  for (int i = 0; i < 200000; ++i) {
    const int64_t value = static_cast<int64_t>(random()) >> (10 + random() % 50);  // exact in fp64
    wanted += value;
    sum.add(static_cast<double>(value));
  }
  expect_bits(sum.value(), static_cast<double>(wanted));
}

TEST(ExactSum, AgreesWithLongDoubleWhereThatIsExact) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    long double wanted = 0;
    ExactSum sum;
    for (int i = 0; i < 60; ++i) {
      const double value = std::ldexp(static_cast<double>(random() >> 34), -40 - (i % 20));
      const double signed_value = random() & 1 ? value : -value;
      wanted += signed_value;  // 30 + 20 bits and 6 for the count: fewer than 64
      sum.add(signed_value);
    }
    expect_bits(sum.value(), wanted == 0 ? 0.0 : static_cast<double>(wanted));
  }
}

TEST(ExactSum, LimbsAddAsIntegers) {
  std::mt19937_64 random(6);
  ExactSum whole;
  std::vector<ExactSum> ranks(7);
  for (int i = 0; i < 5000; ++i) {
    const double value = any_double(random);
    whole.add(value);
    ranks[i % 7].add(value);
  }
  for (int r = 1; r < 7; ++r) {
    for (size_t i = 0; i < ranks[0].limbs().size(); ++i) {
      ranks[0].limbs()[i] += ranks[r].limbs()[i];
    }
  }
  expect_bits(ranks[0].value(), whole.value());
}

TEST(ExactSum, NonFiniteIsCountedAndNotAdded) {
  ExactSum sum;
  for (double value : {1.5, kInf, -kInf, std::nan(""), 2.0}) sum.add(value);
  EXPECT_EQ(sum.non_finite(), 3);
  expect_bits(sum.value(), 3.5);
  ExactSum other;
  other.add(sum);
  EXPECT_EQ(other.non_finite(), 3);
}

}  // namespace

}  // namespace shardrun
