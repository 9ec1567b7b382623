// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers:
// As Easy as 1, 2, 3", SC 2011). A number is a function of what it is for and never of who draws it:
// same bits on every rank, thread and device. The generator itself is kernels/math/philox.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace shardrun {

enum class Purpose : uint32_t {
  init = 1,
  dropout = 2,
  stochastic_rounding = 3,
  shuffle = 4,
  sample = 5,
};

// What a kernel needs to draw: the counter of element e is {e/4 low, e/4 high, step, leaf}, and the
// draw for e is word e % 4 of that counter's output.
struct RandomKey {
  uint64_t key = 0;
  uint32_t step = 0;
  uint32_t leaf = 0;
};

// 64-bit mixing (splitmix64's finaliser, Steele, Lea, Flood 2014), chained over the parts of a key.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
constexpr uint64_t mix64(uint64_t a, uint64_t b) { return mix64(mix64(a) ^ b); }

// FNV-1a, for names inside keys.
constexpr uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return h;
}

constexpr RandomKey random_key(uint64_t seed, Purpose purpose, uint64_t site, int64_t step,
                               int64_t leaf) {
  return {mix64(mix64(seed, static_cast<uint64_t>(purpose)), site), static_cast<uint32_t>(step),
          static_cast<uint32_t>(leaf)};
}

}  // namespace shardrun
