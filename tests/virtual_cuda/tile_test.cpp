// The tile product of kernels/cuda/tile.h against sums in double: the tensor cores' layout as
// tests/virtual_cuda/tensor_core.h has it, and the plain ways of doing the same, which nvcc takes for fp32
// and for architectures without the instructions.
#include <gtest/gtest.h>

#include "kernels/cuda/tile.h"
#include "tests/kernels/levels.h"

namespace shardrun::cuda {
namespace {

constexpr int kColumns = 48;  // of each matrix in shared memory
constexpr int kFilled = 32;   // rows

template <typename T>
using Matrix = SharedMatrix<T, kColumns>;

enum class B { across, down };

// c of two tiles side by side [16, 16] = m[row.., k0..] x b, in memory as C's map says.
template <typename T, B kB, bool kPlain>
__global__ void product_kernel(float* c, const T* m, int row, int k0, int b_row, int b_column) {
  const Matrix<T> shared{4};
  constexpr int kInChunk = 16 / sizeof(T);
  for (int i = static_cast<int>(threadIdx.x); i < kFilled * kColumns / kInChunk; i += kLanes) {
    store_words(shared.word(i * kInChunk / kColumns, i * kInChunk % kColumns),
                load_vector(m + i * kInChunk));
  }
  __syncthreads();
  TileA<T> a;
  TileB<T> b[2];
  if constexpr (kPlain) {
    load_a_plainly(a, shared, row, k0);
    kB == B::across ? load_b_plainly(b, shared, b_row, b_column)
                    : load_b_down_plainly(b, shared, b_row, b_column);
  } else {
    load_a(a, shared, row, k0);
    kB == B::across ? load_b(b, shared, b_row, b_column) : load_b_down(b, shared, b_row, b_column);
  }
  for (int n = 0; n < 2; ++n) {
    TileC sum{{1, 2, 3, 4}};
    kPlain ? multiply_by_shuffles(sum, a, b[n]) : multiply(sum, a, b[n]);
    for (int e = 0; e < 4; ++e) {
      c[(tile_row() + e / 2 * 8) * 16 + 8 * n + tile_column() + e % 2] =
          sum.x[e] - static_cast<float>(e + 1);
    }
  }
}

template <typename T, B kB, bool kPlain>
void expect_product(Dtype dtype) {
  SCOPED_TRACE(
      fmt::format("{}{}{}", name_of(dtype), kB == B::down ? " down" : "", kPlain ? " plain" : ""));
  const Array m = Array::normal(dtype, {kFilled, kColumns}, 3);
  alignas(16) T aligned[kFilled * kColumns];
  std::memcpy(aligned, m.tensor().data(), sizeof aligned);
  for (const auto& at : {std::array{0, 0, 0, 0}, {16, 16, 16, 32}, {8, 32, 8, 16}}) {
    float c[256];
    launch({"product", dim3(1), dim3(kLanes), nullptr,
            sizeof(uint32_t) * static_cast<size_t>(4 + Matrix<T>::words(kFilled))},
           product_kernel<T, kB, kPlain>, &c[0], static_cast<const T*>(aligned), at[0], at[1],
           at[2], at[3]);
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) {
        double want = 0, size = 4;
        for (int k = 0; k < 16; ++k) {
          const double factor = kB == B::across ? m[(at[2] + j) * kColumns + at[3] + k]
                                                : m[(at[2] + k) * kColumns + at[3] + j];
          const double product = m[(at[0] + i) * kColumns + at[1] + k] * factor;
          want += product;
          size += std::abs(product);
        }
        ASSERT_LE(std::abs(c[16 * i + j] - want), 2 * 18 * 0x1p-24 * size) << i << ", " << j;
      }
    }
  }
}

template <typename T>
void expect_products(Dtype dtype) {
  expect_product<T, B::across, false>(dtype);
  expect_product<T, B::down, false>(dtype);
  expect_product<T, B::across, true>(dtype);
  expect_product<T, B::down, true>(dtype);
}

TEST(VirtualTile, ProductsAreRight) {
  expect_products<Bf16>(Dtype::bf16);
  expect_products<Fp16>(Dtype::fp16);
  expect_products<float>(Dtype::fp32);
}

// Two c's side by side are an a: (m n) m.
template <typename T>
__global__ void chain_kernel(float* c, const T* m) {
  const Matrix<T> shared{0};
  for (int i = static_cast<int>(threadIdx.x); i < 16 * kColumns * static_cast<int>(sizeof(T)) / 16;
       i += kLanes) {
    constexpr int kInChunk = 16 / sizeof(T);
    store_words(shared.word(i * kInChunk / kColumns, i * kInChunk % kColumns),
                load_vector(m + i * kInChunk));
  }
  __syncthreads();
  TileA<T> a;
  TileB<T> b[2];
  TileC first[2]{}, second[2]{};
  load_a(a, shared, 0, 0);
  load_b_down(b, shared, 0, 16);
  for (int n = 0; n < 2; ++n) multiply(first[n], a, b[n]);
  const TileA<T> product = as_a<T>(first[0], first[1]);
  load_b_down(b, shared, 0, 32);
  for (int n = 0; n < 2; ++n) multiply(second[n], product, b[n]);
  for (int e = 0; e < 8; ++e) {
    c[(tile_row() + e % 4 / 2 * 8) * 16 + e / 4 * 8 + tile_column() + e % 2] =
        second[e / 4].x[e % 4];
  }
}

template <typename T>
void expect_chain(Dtype dtype) {
  SCOPED_TRACE(name_of(dtype));
  Array m(dtype, {16, kColumns});  // small whole numbers: nothing is rounded
  for (int i = 0; i < 16 * kColumns; ++i) m.set(i, static_cast<float>(i * 7 % 5 - 2));
  alignas(16) T aligned[16 * kColumns];
  std::memcpy(aligned, m.tensor().data(), sizeof aligned);
  float c[256];
  launch({"chain", dim3(1), dim3(kLanes), nullptr,
          sizeof(uint32_t) * static_cast<size_t>(Matrix<T>::words(16))},
         chain_kernel<T>, &c[0], static_cast<const T*>(aligned));
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      double want = 0;
      for (int k = 0; k < 16; ++k) {
        double first = 0;
        for (int l = 0; l < 16; ++l) first += m[i * kColumns + l] * m[l * kColumns + 16 + k];
        want += first * m[k * kColumns + 32 + j];
      }
      ASSERT_EQ(c[16 * i + j], want) << i << ", " << j;
    }
  }
}

TEST(VirtualTile, ProductsFollowOneAnother) {
  expect_chain<Bf16>(Dtype::bf16);
  expect_chain<Fp16>(Dtype::fp16);
  expect_chain<float>(Dtype::fp32);
}

// All lanes of a warp have to come to the same operation.
__global__ void divergent_kernel(int) {
  TileC c{};
  if (threadIdx.x != 5) multiply(c, TileA<Bf16>{}, TileB<Bf16>{});
}

__global__ void other_operation_kernel(int) {
  TileC c{};
  if (threadIdx.x % 2 == 0) {
    multiply(c, TileA<Bf16>{}, TileB<Bf16>{});
  } else {
    multiply(c, TileA<Fp16>{}, TileB<Fp16>{});
  }
}

__global__ void misaligned_kernel(int) {
  const Matrix<Bf16> shared{0};
  store_words(shared.word(0, 0), uint4{});
  TileA<Bf16> a;
  load_a(a, shared, 0, 2);
}

TEST(VirtualTile, MisuseIsAnError) {
  const auto run = [](void (*kernel)(int)) {
    launch({"misuse", dim3(1), dim3(kLanes), nullptr, 8192}, kernel, 0);
  };
  EXPECT_THROW(run(divergent_kernel), virtual_cuda::Violation);
  EXPECT_THROW(run(other_operation_kernel), virtual_cuda::Violation);
  EXPECT_THROW(run(misaligned_kernel), virtual_cuda::Violation);
}

}  // namespace
}  // namespace shardrun::cuda
