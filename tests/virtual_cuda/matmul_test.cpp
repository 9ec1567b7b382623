// The cuBLASLt matmul over the virtual library, against sums in double.
#include <gtest/gtest.h>

#include <deque>
#include <limits>

#include "kernels/cuda/table.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/matmul_reference.h"
#include "tests/virtual_cuda/host_device.h"

namespace shardrun {
namespace {

Array normals(Dtype dtype, const Shape& shape, uint32_t seed, int64_t offset) {
  return MatmulOperands::normals(dtype, shape, seed, offset);
}

void expect_right(const MatmulCase& t) {
  SCOPED_TRACE(t.text());
  const MatmulOperands in(t);
  HostDevice device;
  Stream stream(device, t.workspace, Priority::compute);
  const auto run = [&] {
    Array c = in.before;
    cuda::matmul(c.tensor(), in.a.tensor(), t.transpose_a, in.b.tensor(), t.transpose_b,
                 t.bias ? in.bias.tensor() : ConstTensor(), t.accumulate, stream);
    return c;
  };
  const Array c = run();
  EXPECT_TRUE(c.same_bits(run())) << "a second time gives other bits";
  check_matmul(t, in, c);
}

constexpr size_t kWorkspace = 1 << 16;

TEST(VirtualMatmul, EveryKindOfProductIsRight) {
  for (Dtype dtype : kFloating) {
    for (Dtype c_dtype : {Dtype::fp32, dtype}) {
      for (Dtype bias_dtype : kFloating) {
        for (int flags = 0; flags < 16; ++flags) {
          const bool bias = (flags & 4) != 0, accumulate = (flags & 8) != 0;
          if (accumulate && c_dtype != Dtype::fp32) continue;
          if (!bias && bias_dtype != dtype) continue;
          expect_right({37, 53, 29, dtype, c_dtype, bias_dtype, (flags & 1) != 0, (flags & 2) != 0,
                        bias, accumulate, flags % 3, kWorkspace});
        }
      }
    }
  }
}

TEST(VirtualMatmul, EverySizeIsRight) {
  const int64_t sizes[][3] = {{1, 1, 1},    {1, 7, 1},     {7, 1, 13},  {1, 300, 65},
                              {2, 3, 0},    {0, 5, 3},     {5, 0, 3},   {0, 0, 0},
                              {64, 64, 64}, {257, 131, 3}, {61, 1, 17}, {33, 31, 1100}};
  for (Dtype dtype : kFloating) {
    for (const auto& s : sizes) {
      const auto [m, n, k] = std::array{s[0], s[1], s[2]};
      expect_right({m, n, k, dtype, dtype, dtype, false, false, true, false, 0, kWorkspace});
      expect_right({m, n, k, dtype, dtype, Dtype::fp32, false, true, true, false, 0, kWorkspace});
      expect_right({m, n, k, dtype, Dtype::fp32, dtype, true, false, false, true, 1, kWorkspace});
    }
  }
}

// Sums that wait for their bias go through the workspace in parts where they do not fit, and no
// workspace at all suits products that need none.
TEST(VirtualMatmul, AnyWorkspaceThatHoldsARowWillDo) {
  for (bool transpose_a : {false, true}) {
    for (size_t workspace : {size_t{512}, size_t{1024}, size_t{4096}, size_t{9000}, kWorkspace}) {
      expect_right({38, 53, 29, Dtype::bf16, Dtype::bf16, Dtype::fp32, transpose_a, false, true,
                    false, 0, workspace});
    }
  }
  expect_right(
      {38, 53, 29, Dtype::bf16, Dtype::bf16, Dtype::bf16, false, false, true, false, 0, 0});
  EXPECT_THROW(expect_right({38, 53, 29, Dtype::bf16, Dtype::bf16, Dtype::fp32, false, false, true,
                             false, 0, 128}),
               DeviceError);
}

// Rounding the product and then adding the bias would round twice.
TEST(VirtualMatmul, BiasIsAddedBeforeTheOnlyRounding) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    for (Dtype bias_dtype : {Dtype::fp32, dtype}) {
      Array a(dtype, {1, 2}), b(dtype, {2, 1}), bias(bias_dtype, {1}), c(dtype, {1, 1});
      const float tiny = static_cast<float>(unit_roundoff(dtype));
      a.set(0, 1.0f);
      a.set(1, tiny);
      b.set(0, 1.0f);
      b.set(1, 1.0f);
      bias.set(0, -1.0f);
      HostDevice device;
      Stream stream(device, kWorkspace, Priority::compute);
      cuda::matmul(c.tensor(), a.tensor(), false, b.tensor(), false, bias.tensor(), false, stream);
      EXPECT_EQ(c[0], tiny);
    }
  }
}

// A stream keeps its plans; each product gets its own, whatever came before.
TEST(VirtualMatmul, PlansOfOneStreamDoNotMix) {
  HostDevice device;
  Stream stream(device, kWorkspace, Priority::compute);
  std::deque<Array> biases;  // each at an address of its own
  for (int round = 0; round < 2; ++round) {
    for (int64_t k : {3, 4}) {
      for (Dtype c_dtype : {Dtype::bf16, Dtype::fp32}) {
        for (bool with_bias : {false, true}) {
          for (int64_t offset : {0, 1, 4}) {
            const Array a = normals(Dtype::bf16, {2, k}, 1, offset);
            const Array b = normals(Dtype::bf16, {k, 5}, 2, 4 - offset);
            const float first = static_cast<float>(round + offset);
            Array& bias = biases.emplace_back(c_dtype, Shape{5});
            Array c(c_dtype, {2, 5});
            bias.set(0, first);
            cuda::matmul(c.tensor(), a.tensor(), false, b.tensor(), false,
                         with_bias ? bias.tensor() : ConstTensor(), false, stream);
            double want = with_bias ? first : 0;
            for (int64_t p = 0; p < k; ++p) want += a[p] * b[5 * p];
            EXPECT_NEAR(c[0], want, 0.02 + 0.01 * std::abs(want));
          }
        }
      }
    }
  }
}

TEST(VirtualMatmul, TheLibraryHasAName) {
  EXPECT_EQ(cuda::matmul_library(), "cuBLASLt-13.1.0");
}

}  // namespace
}  // namespace shardrun
