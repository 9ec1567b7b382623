// Works on the bits of a double throughout: threads flush denormals, and these are exact.
#include "comm/exact_sum.h"

#include <bit>

#include "runtime/error.h"

namespace shardrun {

namespace {

constexpr uint64_t kLow32 = 0xffffffffull;
constexpr uint64_t kInfinity = uint64_t{0x7ff} << 52;
constexpr uint64_t kSign = uint64_t{1} << 63;

}  // namespace

void ExactSum::add(double value) {
  const math::ExactParts parts = math::exact_parts(value);
  if (!parts.finite) {
    ++limbs_[kLimbs];
    return;
  }
  make_room(1);
  for (int i = 0; i < 3; ++i) limbs_[parts.first + i] += parts.part[i];
}

void ExactSum::add(std::span<const int64_t> limbs, int64_t additions) {
  SHARDRUN_CHECK(limbs.size() == kLimbs + 1 && additions < kHeadroom,
                 "{} limbs of {} additions, wanted {} of less than {}", limbs.size(), additions,
                 kLimbs + 1, kHeadroom);
  make_room(additions);
  for (int i = 0; i <= kLimbs; ++i) limbs_[i] += limbs[i];
}

void ExactSum::add(const ExactSum& other) {
  ExactSum addend = other;
  addend.carry();
  make_room(1);
  for (int i = 0; i <= kLimbs; ++i) limbs_[i] += addend.limbs_[i];
}

std::span<int64_t> ExactSum::limbs() {
  carry();
  // The caller may add up as many carried limbs as there are ranks.
  additions_ = kHeadroom / 2;
  return limbs_;
}

void ExactSum::make_room(int64_t additions) {
  if (additions_ + additions > kHeadroom) carry();
  additions_ += additions;
}

// Leaves limbs in [0, 2^32), the sign in the topmost. Shifts of negative numbers round down.
void ExactSum::carry() {
  for (int i = 0; i + 1 < kLimbs; ++i) {
    const int64_t over = limbs_[i] >> 32;
    limbs_[i] &= static_cast<int64_t>(kLow32);
    limbs_[i + 1] += over;
  }
  additions_ = 1;
}

double ExactSum::value() const {
  ExactSum sum = *this;
  sum.carry();
  const bool negative = sum.limbs_[kLimbs - 1] < 0;
  if (negative) {
    for (int i = 0; i < kLimbs; ++i) sum.limbs_[i] = -sum.limbs_[i];
    sum.carry();
  }
  int top = kLimbs - 1;
  while (top >= 0 && sum.limbs_[top] == 0) --top;
  if (top < 0) return 0.0;
  const auto limb = [&](int i) { return i < 0 ? 0 : static_cast<uint64_t>(sum.limbs_[i]); };
  const int highest = 32 * top + std::bit_width(limb(top)) - 1;

  uint64_t bits;
  if (highest > 2097) {
    bits = kInfinity;  // the largest double's first bit counts 2^(2097 - 1074)
  } else if (highest <= 52) {
    bits = limb(0) | limb(1) << 32;  // a subnormal or the least binade: its encoding is the integer
  } else {
    const int lowest = highest - 52;  // the mantissa's last bit; the one below decides the rounding
    const auto bit = [&](int position) { return limb(position / 32) >> (position % 32) & 1; };
    uint64_t mantissa = 0;
    for (int position = highest; position >= lowest; --position) {
      mantissa = mantissa << 1 | bit(position);
    }
    bool below = false;
    for (int position = 0; position < lowest - 1 && !below; ++position) below = bit(position) != 0;
    if (bit(lowest - 1) && (below || (mantissa & 1))) ++mantissa;
    // The mantissa brings its leading one, which counts as one exponent; so does a carry out of it.
    bits = (static_cast<uint64_t>(lowest) << 52) + mantissa;
  }
  return std::bit_cast<double>(bits | (negative ? kSign : 0));
}

}  // namespace shardrun
