// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
// 2011. What a counter means is in runtime/random.h.
#pragma once

#include "kernels/math/isa.h"
#include "runtime/random.h"

namespace shardrun::math {
inline namespace SHARDRUN_ISA {

struct Words4 {
  uint32_t word[4];
};

HD Words4 philox(Words4 counter, uint32_t key0, uint32_t key1) {
  uint32_t a = counter.word[0], b = counter.word[1], c = counter.word[2], d = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(0xD2511F53u) * a;
    const uint64_t second = static_cast<uint64_t>(0xCD9E8D57u) * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key0;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key1;
    d = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// words.word[k] without an indexed load, which would put the words into a GPU's local memory.
HD uint32_t word_of(const Words4& words, int k) {
  const uint32_t low = k & 1 ? words.word[1] : words.word[0];
  const uint32_t high = k & 1 ? words.word[3] : words.word[2];
  return k & 2 ? high : low;
}

// The draws of elements 4 `group` .. 4 `group` + 3.
HD Words4 draw_group(const RandomKey& key, uint64_t group) {
  return philox(
      {{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), key.step, key.leaf}},
      static_cast<uint32_t>(key.key), static_cast<uint32_t>(key.key >> 32));
}

// The draw of one element.
HD uint32_t draw(const RandomKey& key, uint64_t element) {
  return draw_group(key, element / 4).word[element % 4];
}

}  // namespace SHARDRUN_ISA
}  // namespace shardrun::math
