// Every kernel on a GPU against the CPU: the same bits where both run one functor, within bounds of
// sums in double for matmul and attention. Needs a GPU and is skipped without one, unless
// --require-gpu; linked with the virtual backend it runs on that.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "kernels/matmul.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/gpu_cases.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/matmul_reference.h"

namespace shardrun {
namespace {

bool gpu_required = false;

class Parity : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() > 0) {
      device_ = make_cuda_device(0);
    } else if (gpu_required) {
      FAIL() << cuda_unavailable();
    } else {
      GTEST_SKIP() << cuda_unavailable();
    }
  }
  // The same bits twice, and near the truth.
  void expect_right(const MatmulCase& t, int64_t stride = 1) {
    SCOPED_TRACE(t.text());
    const MatmulOperands in(t);
    const auto run = [&] {
      Array c = in.before;
      Stream stream(*device_, t.workspace, Priority::compute);
      Operands on(stream);
      kernels::matmul(on.out(c), on.in(in.a), transpose(t.transpose_a), on.in(in.b),
                      transpose(t.transpose_b), on.in(t.bias ? &in.bias : nullptr), t.accumulate,
                      stream);
      return on.results({&c})[0];
    };
    const Array c = run();
    EXPECT_TRUE(c.same_bits(run())) << "a second time gives other bits";
    check_matmul(t, in, c, stride);
  }
  static kernels::Transpose transpose(bool yes) {
    return yes ? kernels::Transpose::yes : kernels::Transpose::no;
  }

  void expect_right(const AttentionCase& t, int64_t offset = 0) {
    SCOPED_TRACE(fmt::format("B {} T {} H {} D {} {}{} dropout {} offset {}", t.batch, t.time,
                             t.heads, t.size, name_of(t.dtype), t.causal ? " causal" : "",
                             t.dropout, offset));
    const auto normals = MatmulOperands::normals;
    const Array qkv = normals(t.dtype, {t.batch, t.time, 3 * t.columns()}, 5, offset);
    const Array dout = normals(t.dtype, {t.batch, t.time, t.columns()}, 6, offset);
    const auto run = [&] {
      Stream stream(*device_, size_t{1} << 20, Priority::compute);
      Operands on(stream);
      AttentionResult r = {Array(t.dtype, {t.batch, t.time, t.columns()}, offset),
                           Array(Dtype::fp32, {t.batch, t.heads, t.time}),
                           Array(t.dtype, {t.batch, t.time, 3 * t.columns()}, offset)};
      for (Array* array : {&r.out, &r.lse, &r.dqkv}) {
        std::memset(array->tensor().data(), 0xff, array->tensor().bytes());  // NaN
      }
      const Tensor out = on.out(r.out), lse = on.out(r.lse);
      const ConstTensor in = on.in(qkv);
      kernels::attention_forward(out, lse, in, t.options(), stream);
      kernels::attention_backward(on.out(r.dqkv), on.in(dout), out, in, lse, t.options(), stream);
      on.results({});
      return r;
    };
    const AttentionResult r = run(), again = run();
    EXPECT_TRUE(r.out.same_bits(again.out) && r.lse.same_bits(again.lse) &&
                r.dqkv.same_bits(again.dqkv));
    check_attention(t, qkv, dout, r);
  }

  std::unique_ptr<Device> device_;
};

TEST_F(Parity, Elementwise) {
  expect_same_bits(elementwise_cases(), *device_);
}
TEST_F(Parity, Norm) {
  expect_same_bits(norm_cases(), *device_);
}
TEST_F(Parity, Reduce) {
  expect_same_bits(reduce_cases(), *device_);
}
TEST_F(Parity, Adamw) {
  expect_same_bits(adamw_cases(), *device_);
}
TEST_F(Parity, Embedding) {
  expect_same_bits(embedding_cases(), *device_);
}
TEST_F(Parity, Loss) {
  expect_same_bits(loss_cases(), *device_);
}

constexpr size_t kWorkspace = size_t{4} << 20;

TEST_F(Parity, Matmul) {
  for (Dtype dtype : kFloating) {
    for (Dtype c_dtype : {Dtype::fp32, dtype}) {
      for (int flags = 0; flags < 16; ++flags) {
        const bool bias = (flags & 4) != 0, accumulate = (flags & 8) != 0;
        if (accumulate && c_dtype != Dtype::fp32) continue;
        for (Dtype bias_dtype : {Dtype::fp32, dtype}) {
          for (int64_t offset : {0, 1}) {
            expect_right({40, 56, 32, dtype, c_dtype, bias_dtype, (flags & 1) != 0,
                          (flags & 2) != 0, bias, accumulate, offset, kWorkspace});
            expect_right({37, 53, 29, dtype, c_dtype, bias_dtype, (flags & 1) != 0,
                          (flags & 2) != 0, bias, accumulate, offset, kWorkspace});
          }
        }
      }
    }
    const int64_t sizes[][3] = {{1, 1, 1}, {7, 1, 13}, {2, 3, 0}, {0, 5, 3}, {257, 131, 3}};
    for (const auto& s : sizes) {
      expect_right(
          {s[0], s[1], s[2], dtype, dtype, Dtype::fp32, false, true, true, false, 0, kWorkspace});
    }
  }
}

// Many steps of K, and every tile of the library full: a sample of the elements is looked at.
TEST_F(Parity, LargeMatmul) {
  for (Dtype dtype : kFloating) {
    expect_right({256, 384, 1024, dtype, dtype, dtype, false, true, true, false, 0, kWorkspace},
                 37);
    expect_right(
        {256, 128, 1031, dtype, Dtype::fp32, dtype, true, false, false, true, 0, kWorkspace}, 37);
  }
}

TEST_F(Parity, Attention) {
  for (Dtype dtype : kFloating) {
    for (bool causal : {true, false}) {
      for (float dropout : {0.0f, 0.25f}) {
        expect_right(AttentionCase{2, 33, 3, 16, dtype, causal, dropout});
        expect_right(AttentionCase{1, 131, 2, 64, dtype, causal, dropout});
        expect_right(AttentionCase{1, 7, 2, 5, dtype, causal, dropout}, 1);
      }
    }
    for (int64_t size : {1, 32, 33, 80, 96, 127, 128}) {
      expect_right(AttentionCase{1, 67, 1, size, dtype, true, 0});
      expect_right(AttentionCase{1, 65, 2, size, dtype, false, 0.5f}, 3);
    }
    for (int64_t time : {1, 16, 63, 64, 65, 128, 193}) {
      expect_right(AttentionCase{1, time, 1, 24, dtype, true, 0});
    }
  }
}

}  // namespace
}  // namespace shardrun

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--require-gpu") != 0) {
      std::fprintf(stderr, "%s: unknown argument\n", argv[i]);
      return 64;
    }
    shardrun::gpu_required = true;
  }
  return RUN_ALL_TESTS();
}
