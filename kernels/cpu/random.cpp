// Philox over many counters: the draws of a block.
#include "kernels/cpu/block.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

// A counter's words stand in the low halves of 64-bit lanes, where the widening multiplication
// takes them; what lies in the high halves is never looked at.
#if defined(__AVX512F__)
constexpr int kCounters = 8;
typedef uint64_t Words __attribute__((vector_size(64)));
constexpr Words kIota = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr Words kLow = {0, 8, 1, 9, 2, 10, 3, 11};  // interleave two vectors: first and second half
constexpr Words kHigh = {4, 12, 5, 13, 6, 14, 7, 15};
HD Words multiply(Words a, Words b) {
  return (Words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
constexpr int kCounters = 4;
typedef uint64_t Words __attribute__((vector_size(32)));
constexpr Words kIota = {0, 1, 2, 3};
constexpr Words kLow = {0, 4, 1, 5};
constexpr Words kHigh = {2, 6, 3, 7};
HD Words multiply(Words a, Words b) {
  return (Words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
#else
constexpr int kCounters = 2;
typedef uint64_t Words __attribute__((vector_size(16)));
constexpr Words kIota = {0, 1};
constexpr Words kLow = {0, 2};
constexpr Words kHigh = {1, 3};
HD Words multiply(Words a, Words b) {
  return (Words)_mm_mul_epu32((__m128i)a, (__m128i)b);
}
#endif

// Draws of the groups [first, first + kCounters): math::draw_group for each.
HD void draw_groups(const RandomKey& key, uint64_t first, uint32_t* out) {
  Words a = kIota + first;
  Words b = a >> 32;
  Words c = Words{} + key.step;
  Words d = Words{} + key.leaf;
  Words key0 = Words{} + key.key;
  Words key1 = key0 >> 32;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Words p = multiply(a, Words{} + 0xD2511F53u);
    const Words q = multiply(c, Words{} + 0xCD9E8D57u);
    a = (q >> 32) ^ b ^ key0;
    b = q;
    c = (p >> 32) ^ d ^ key1;
    d = p;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const Words ab = (a & 0xffffffffu) | (b << 32);
  const Words cd = (c & 0xffffffffu) | (d << 32);
  const Words halves[2] = {__builtin_shuffle(ab, cd, kLow), __builtin_shuffle(ab, cd, kHigh)};
  __builtin_memcpy(out, halves, sizeof halves);
}

}  // namespace

const uint32_t* draws(const RandomKey& key, int64_t begin, int64_t n, uint32_t* out) {
  const int64_t lead = begin % 4;
  const uint64_t group = static_cast<uint64_t>(begin / 4);
  for (int64_t i = 0; i < lead + n; i += 4 * kCounters) {
    draw_groups(key, group + static_cast<uint64_t>(i / 4), out + i);
  }
  return out + lead;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
