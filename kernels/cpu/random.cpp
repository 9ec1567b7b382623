// Philox, sixteen counters side by side.
#include "kernels/cpu/block.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

constexpr int kGroups = 16;

void draw_groups(const RandomKey& key, uint64_t first, uint32_t* out) {
  alignas(64) uint32_t words[4][kGroups];
  for (int k = 0; k < kGroups; ++k) {
    const math::Words4 w = math::draw_group(key, first + static_cast<uint64_t>(k));
    for (int j = 0; j < 4; ++j) words[j][k] = w.word[j];
  }
  for (int k = 0; k < kGroups; ++k) {
    for (int j = 0; j < 4; ++j) out[4 * k + j] = words[j][k];
  }
}

}  // namespace

const uint32_t* draws(const RandomKey& key, int64_t begin, int64_t n, uint32_t* out) {
  const int64_t lead = begin % 4;
  const uint64_t group = static_cast<uint64_t>(begin / 4);
  for (int64_t i = 0; i < lead + n; i += 4 * kGroups) {
    draw_groups(key, group + static_cast<uint64_t>(i / 4), out + i);
  }
  return out + lead;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
