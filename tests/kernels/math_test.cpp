// The functors under every kernel: conversions for all 16-bit values, elementary functions against
// libm in double, Philox against the authors' known answers.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/math/convert.h"
#include "kernels/math/functions.h"
#include "kernels/math/gelu.h"
#include "kernels/math/philox.h"
#include "runtime/thread_pool.h"

namespace shardrun {
namespace {

uint16_t to_bf16(float x) {
  Bf16 out;
  math::narrow(x, out);
  return out.bits;
}
uint16_t to_fp16(float x) {
  Fp16 out;
  math::narrow(x, out);
  return out.bits;
}

TEST(Convert, EveryBf16RoundTrips) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const Bf16 x{static_cast<uint16_t>(h)};
    const float wide = math::widen(x);
    const uint32_t magnitude = h & 0x7fffu;
    if (magnitude > 0x7f80u) {
      EXPECT_TRUE(std::isnan(wide)) << h;
      EXPECT_EQ(to_bf16(wide), h | 0x40u);
    } else {
      EXPECT_EQ(to_bf16(wide), magnitude < 0x80u ? h & 0x8000u : h);
    }
  }
}

TEST(Convert, EveryFp16RoundTrips) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float wide = math::widen(Fp16{static_cast<uint16_t>(h)});
    const uint32_t magnitude = h & 0x7fffu;
    const int exponent = static_cast<int>(magnitude >> 10), fraction = static_cast<int>(h & 0x3ffu);
    if (magnitude > 0x7c00u) {
      EXPECT_TRUE(std::isnan(wide)) << h;
      EXPECT_EQ(to_fp16(wide), h | 0x200u);
      continue;
    }
    EXPECT_EQ(to_fp16(wide), h);
    double value =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (magnitude == 0x7c00u) value = std::numeric_limits<double>::infinity();
    EXPECT_EQ(static_cast<double>(wide), h & 0x8000u ? -value : value) << h;
  }
}

// The 16-bit formats are ordered like their bits, so rounding is held against the midpoints of all
// neighbours: below goes down, above goes up, the tie goes to the even one.
template <typename To, typename Wide>
void check_midpoints(uint32_t first, uint32_t last, To to, Wide wide) {
  for (uint32_t h = first; h < last; ++h) {
    const double low = wide(h), high = wide(h + 1);
    const float middle = static_cast<float>((low + high) / 2);
    const uint32_t even = h % 2 == 0 ? h : h + 1;
    ASSERT_EQ(to(middle), even) << h;
    ASSERT_EQ(to(-middle), even | 0x8000u) << h;
    ASSERT_EQ(to(std::nextafterf(middle, 0.0f)), h);
    ASSERT_EQ(to(std::nextafterf(middle, std::numeric_limits<float>::infinity())), h + 1);
  }
}

TEST(Convert, RoundsToNearestEven) {
  // The last finite number and the one that would follow it: ties there round to infinity.
  check_midpoints(0x80, 0x7f7f, to_bf16,
                  [](uint32_t h) { return math::widen(Bf16{static_cast<uint16_t>(h)}); });
  check_midpoints(0, 0x7bff, to_fp16,
                  [](uint32_t h) { return math::widen(Fp16{static_cast<uint16_t>(h)}); });
  EXPECT_EQ(to_fp16(65519.996f), 0x7bff);
  EXPECT_EQ(to_fp16(65520.0f), 0x7c00);
  EXPECT_EQ(to_fp16(-1e30f), 0xfc00);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Convert, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_bf16(infinity), 0x7f80);
  EXPECT_EQ(to_fp16(-infinity), 0xfc00);
  // A NaN whose payload lies in the bits that are cut off.
  const float low_nan = math::float_of(0x7f800001u);
  EXPECT_GT(to_bf16(low_nan) & 0x7fff, 0x7f80);
  EXPECT_GT(to_fp16(low_nan) & 0x7fff, 0x7c00);
  const float denormal = math::float_of(0x807fffffu);
  EXPECT_EQ(to_bf16(denormal), 0x8000);
  EXPECT_EQ(to_fp16(denormal), 0x8000);
  EXPECT_EQ(math::bits_of(math::flush(denormal)), 0x80000000u);
  EXPECT_EQ(math::flush(1.5f), 1.5f);
}

TEST(Convert, IndependentOfFlushModes) {
  std::vector<float> before;
  for (uint32_t h = 0; h < 0x10000; ++h) {
    before.push_back(math::widen(Fp16{static_cast<uint16_t>(h)}));
  }
  flush_denormals_on_this_thread();
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float now = math::widen(Fp16{static_cast<uint16_t>(h)});
    ASSERT_EQ(math::bits_of(now), math::bits_of(before[h]));
    if (!std::isnan(now)) {
      ASSERT_EQ(to_fp16(now), h);
    }
  }
}

TEST(Convert, StochasticRoundingCutsOrRaises) {
  const float x = math::float_of(0x3f808000u);  // in the middle of two bf16 numbers
  EXPECT_EQ(math::narrow_stochastic(x, 0x7fff).bits, 0x3f80);
  EXPECT_EQ(math::narrow_stochastic(x, 0xffff8000u).bits, 0x3f81);
  EXPECT_EQ(math::narrow_stochastic(1.0f, 0xffff).bits, 0x3f80);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(math::narrow_stochastic(-infinity, 0xffff).bits, 0xff80);
  EXPECT_GT(math::narrow_stochastic(math::float_of(0x7fffffffu), 0xffff).bits, 0x7f80);
}

// Error in ulps of the result over a dense walk through the bits of the arguments.
template <typename F, typename G>
double worst_ulps(float low, float high, F f, G reference) {
  double worst = 0;
  const uint32_t a = math::bits_of(std::min(std::abs(low), std::abs(high)));
  const uint32_t b = math::bits_of(std::max(std::abs(low), std::abs(high)));
  for (uint32_t bits = a; bits <= b; bits += 509) {
    const float x = std::signbit(low) ? -math::float_of(bits) : math::float_of(bits);
    const double want = reference(static_cast<double>(x));
    const double got = f(x);
    if (std::abs(want) < 0x1p-126) continue;
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(got - want) / ulp);
  }
  return worst;
}

TEST(Functions, Exp) {
  auto f = [](float x) { return math::exp(x); };
  auto g = [](double x) { return std::exp(x); };
  EXPECT_LE(worst_ulps(0x1p-100f, 88.72f, f, g), 2.0);
  EXPECT_LE(worst_ulps(-0x1p-100f, -87.33f, f, g), 2.0);
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_EQ(math::exp(-87.4f), 0.0f);
  EXPECT_EQ(math::exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(math::exp(89.0f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(math::exp(std::numeric_limits<float>::infinity()),
            std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(math::exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Functions, Log) {
  auto f = [](float x) { return math::log(x); };
  auto g = [](double x) { return std::log(x); };
  EXPECT_LE(worst_ulps(0x1p-126f, std::numeric_limits<float>::max(), f, g), 1.0);
  EXPECT_EQ(math::log(1.0f), 0.0f);
  EXPECT_EQ(math::log(0.0f), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(math::log(std::numeric_limits<float>::infinity()),
            std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(math::log(-1.0f)));
  EXPECT_TRUE(std::isnan(math::log(-std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(math::log(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Functions, Tanh) {
  auto f = [](float x) { return math::tanh(x); };
  auto g = [](double x) { return std::tanh(x); };
  EXPECT_LE(worst_ulps(0x1p-60f, 60.0f, f, g), 3.0);
  EXPECT_LE(worst_ulps(-0x1p-60f, -60.0f, f, g), 3.0);
  EXPECT_EQ(math::tanh(std::numeric_limits<float>::infinity()), 1.0f);
  EXPECT_EQ(math::tanh(-std::numeric_limits<float>::infinity()), -1.0f);
  EXPECT_TRUE(std::isnan(math::tanh(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Functions, GeluAtTheEnds) {
  EXPECT_EQ(math::gelu(1e38f), 1e38f);
  EXPECT_EQ(math::gelu(-1e38f), 0.0f);
  EXPECT_EQ(math::gelu_derivative(1e38f), 1.0f);
  EXPECT_NEAR(math::gelu_derivative(-1e38f), 0.0f, 1e-30f);
  EXPECT_TRUE(std::isnan(math::gelu(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(math::gelu_derivative(std::numeric_limits<float>::quiet_NaN())));
}

// The distribution function of the result must give the argument back: error of z = error of the
// probability / density.
TEST(Functions, NormalFromDraw) {
  double worst = 0;
  for (uint64_t d = 0; d < (uint64_t{1} << 32); d += 65537 * 3) {
    for (uint32_t draw : {static_cast<uint32_t>(d), static_cast<uint32_t>(d >> 16)}) {
      const double z = math::normal_from_draw(draw);
      const double u = (static_cast<double>(draw) + 0.5) * 0x1p-32;
      // From the small side, where both keep their digits.
      const double tail = std::min(u, 1 - u);
      const double got = 0.5 * std::erfc(std::abs(z) / std::sqrt(2.0));
      const double density = std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
      worst = std::max(worst, std::abs(got - tail) / density);
      EXPECT_EQ(math::normal_from_draw(~draw), -static_cast<float>(z));
    }
  }
  EXPECT_LE(worst, 2e-6);
  EXPECT_NEAR(math::normal_from_draw(0), -6.338, 1e-3);
}

// kat_vectors of Random123.
TEST(Philox, KnownAnswers) {
  auto check = [](math::Words4 counter, uint32_t k0, uint32_t k1, math::Words4 want) {
    const math::Words4 got = math::philox(counter, k0, k1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want.word[i]) << i;
  };
  check({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff,
        {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
        {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

}  // namespace
}  // namespace shardrun
