// The warp-wide matrix instructions that kernels/cuda/tile.h uses, over the fibers of the virtual
// device: the registers that a lane gives and gets mean the elements that they mean on hardware,
// written down here from the PTX ISA and not from the kernels. So a kernel that reads its fragments
// otherwise gets wrong numbers. Sums are fp32 in order of k; how tensor cores round is not modelled.
#pragma once

#include "kernels/math/convert.h"

namespace shardrun::virtual_cuda {

template <typename Pair>
struct MmaLane {
  float* c;
  const Pair *a, *b;  // registers
};

inline uint16_t half_of(uint32_t bits, int i) {
  return static_cast<uint16_t>(i == 0 ? bits : bits >> 16);
}
template <template <typename> class Pair, typename T>
float element_of_register(const Pair<T>& pair, int i) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return pair.x[i];
  } else {
    return math::widen(T{half_of(pair.bits, i)});
  }
}

// mma.sync.aligned.m16n8k16.row.col.f32.{bf16, f16}, "Matrix Fragments for mma.m16n8k16"; of
// fp32 there is no such instruction, the layout is the same.
template <typename Pair>
void run_mma(void* const* lanes) {
  float a[16][16], b[16][8], c[16][8] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const MmaLane<Pair>*>(lanes[lane]);
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i % 4 < 2 ? group : group + 8;
      const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      a[row][column] = element_of_register(own.a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
      b[row][group] = element_of_register(own.b[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] = own.c[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<const MmaLane<Pair>*>(lanes[lane]);
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 4; ++i) own.c[i] = c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
  }
}

// `Pair` is that of tile.h, which comes later.
template <template <typename> class Pair, typename T>
void mma_m16n8k16(float (&c)[4], const Pair<T> (&a)[4], const Pair<T> (&b)[2],
                  std::source_location at = std::source_location::current()) {
  MmaLane<Pair<T>> own{c, a, b};
  device().exchange(&own, run_mma<Pair<T>>, at);
}

struct LdmatrixLane {
  int row;
  int rows[32];
};

inline void run_ldmatrix(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int l = 0; l < 32; ++l) {
      static_cast<LdmatrixLane*>(lanes[lane])->rows[l] = static_cast<LdmatrixLane*>(lanes[l])->row;
    }
  }
}

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: register i holds, of matrix i, row lane / 4,
// elements 2 (lane % 4) and the next; transposed, of the transposed matrix.
template <bool kTrans, template <typename> class Pair, typename T, typename Words>
void ldmatrix(Pair<T> (&x)[4], Words words, int row, const std::source_location& at) {
  if (row % 4 != 0) device().fail("a row of ldmatrix is not aligned to 16 bytes");
  LdmatrixLane own{row, {}};
  device().exchange(&own, run_ldmatrix, at);
  const int lane = device().lane();
  for (int i = 0; i < 4; ++i) {
    const int* rows = own.rows + 8 * i;
    if constexpr (!kTrans) {
      x[i].bits = words[rows[lane / 4] + lane % 4];
    } else {
      uint32_t bits = 0;
      for (int e = 0; e < 2; ++e) {
        const uint32_t word = words[rows[2 * (lane % 4) + e] + lane / 4 / 2];
        bits |= static_cast<uint32_t>(half_of(word, lane / 4 % 2)) << 16 * e;
      }
      x[i].bits = bits;
    }
  }
}

template <template <typename> class Pair, typename T, typename Words>
void ldmatrix_x4(Pair<T> (&x)[4], Words words, int row,
                 std::source_location at = std::source_location::current()) {
  ldmatrix<false>(x, words, row, at);
}
template <template <typename> class Pair, typename T, typename Words>
void ldmatrix_x4_trans(Pair<T> (&x)[4], Words words, int row,
                       std::source_location at = std::source_location::current()) {
  ldmatrix<true>(x, words, row, at);
}

}  // namespace shardrun::virtual_cuda
