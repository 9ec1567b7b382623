// Flash attention on the virtual device, against the same reference in double and with the same
// bounds as the CPU's; lse against the CPU's.
#include <gtest/gtest.h>

#include <limits>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/table.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/levels.h"
#include "tests/virtual_cuda/device.h"
#include "tests/virtual_cuda/host_device.h"

namespace shardrun {
namespace {

Array poisoned(Dtype dtype, const Shape& shape, int64_t offset) {
  Array out(dtype, shape, offset);
  for (int64_t i = 0; i < out.numel(); ++i) out.set(i, std::numeric_limits<float>::quiet_NaN());
  return out;
}

// The same values, `offset` elements off an aligned address.
Array normals(Dtype dtype, const Shape& shape, uint32_t seed, int64_t offset) {
  const Array values = Array::normal(dtype, shape, seed);
  Array out(dtype, shape, offset);
  for (int64_t i = 0; i < out.numel(); ++i) out.set(i, static_cast<float>(values[i]));
  return out;
}

struct Inputs {
  Array qkv, dout;
  Inputs(const AttentionCase& t, int64_t offset)
      : qkv(normals(t.dtype, {t.batch, t.time, 3 * t.columns()}, 5, offset)),
        dout(normals(t.dtype, {t.batch, t.time, t.columns()}, 6, offset)) {}
};

// Outputs are NaN before; the workspace is as large as asked for.
AttentionResult run_on_device(const AttentionCase& t, const Inputs& in, int64_t offset) {
  HostDevice device;
  Stream stream(device, static_cast<size_t>(t.batch * t.heads * t.time) * sizeof(float),
                Priority::compute);
  AttentionResult r = {poisoned(t.dtype, {t.batch, t.time, t.columns()}, offset),
                       poisoned(Dtype::fp32, {t.batch, t.heads, t.time}, 0),
                       poisoned(t.dtype, {t.batch, t.time, 3 * t.columns()}, offset)};
  cuda::attention_forward(r.out.tensor(), r.lse.tensor(), in.qkv.tensor(), t.options(), stream);
  cuda::attention_backward(r.dqkv.tensor(), in.dout.tensor(), r.out.tensor(), in.qkv.tensor(),
                           r.lse.tensor(), t.options(), stream);
  return r;
}

AttentionResult run_on_cpu(const AttentionCase& t, const Inputs& in, Stream& stream) {
  AttentionResult r = {Array(t.dtype, {t.batch, t.time, t.columns()}),
                       Array(Dtype::fp32, {t.batch, t.heads, t.time}),
                       Array(t.dtype, {t.batch, t.time, 3 * t.columns()})};
  kernels::attention_forward(r.out.tensor(), r.lse.tensor(), in.qkv.tensor(), t.options(), stream);
  return r;
}

void check(const AttentionCase& t, int64_t offset = 0) {
  SCOPED_TRACE(fmt::format("B {} T {} H {} D {} {}{} dropout {} offset {}", t.batch, t.time,
                           t.heads, t.size, name_of(t.dtype), t.causal ? " causal" : "", t.dropout,
                           offset));
  Runner runner;
  const Inputs in(t, offset);
  const AttentionResult r = run_on_device(t, in, offset);
  check_attention(t, in.qkv, in.dout, r);
  const AttentionResult cpu = run_on_cpu(t, in, runner.stream());
  for (int64_t i = 0; i < r.lse.numel(); ++i) {
    ASSERT_NEAR(r.lse[i], cpu.lse[i], 2e-6 * (1 + std::abs(cpu.lse[i]))) << "lse " << i;
  }
  const AttentionResult again = run_on_device(t, in, offset);
  EXPECT_TRUE(r.out.same_bits(again.out) && r.dqkv.same_bits(again.dqkv));
}

class VirtualAttention : public testing::TestWithParam<Dtype> {};

TEST_P(VirtualAttention, EveryKindIsRight) {
  for (bool causal : {true, false}) {
    for (float dropout : {0.0f, 0.25f}) {
      check({2, 33, 3, 16, GetParam(), causal, dropout});
      check({1, 131, 2, 64, GetParam(), causal, dropout});
      check({3, 1, 1, 8, GetParam(), causal, dropout});
      check({1, 7, 2, 5, GetParam(), causal, dropout}, 1);
    }
  }
}

TEST_P(VirtualAttention, EveryHeadSizeIsRight) {
  for (int64_t size : {1, 32, 33, 80, 96, 127, 128}) {
    check({1, 67, 1, size, GetParam(), true, 0});
    check({1, 65, 2, size, GetParam(), false, 0.5f}, 3);
  }
}

TEST_P(VirtualAttention, EveryLengthIsRight) {
  for (int64_t time : {1, 2, 15, 16, 17, 31, 32, 63, 64, 65, 97, 127, 128, 193}) {
    check({1, time, 1, 24, GetParam(), true, 0});
    check({1, time, 1, 24, GetParam(), false, 0.1f});
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, VirtualAttention, testing::ValuesIn(kFloating),
                         [](const auto& info) { return name_of(info.param); });

TEST(VirtualFlash, LargeScoresDoNotOverflow) {
  for (Dtype dtype : kFloating) {
    const AttentionCase t = {1, 70, 1, 16, dtype, true, 0};
    Inputs in(t, 0);
    for (int64_t i = 0; i < in.qkv.numel(); ++i) in.qkv.set(i, 100 * static_cast<float>(in.qkv[i]));
    const AttentionResult r = run_on_device(t, in, 0);
    for (int64_t i = 0; i < r.out.numel(); ++i) ASSERT_TRUE(std::isfinite(r.out[i]));
    for (int64_t i = 0; i < r.dqkv.numel(); ++i) ASSERT_TRUE(std::isfinite(r.dqkv[i]));
  }
}

// A NaN reaches the rows that see it and no other.
TEST(VirtualFlash, NanStaysWhereItBelongs) {
  const AttentionCase t = {1, 70, 1, 16, Dtype::fp32, true, 0};
  Inputs in(t, 0);
  in.qkv.set(40 * 48 + 16, std::numeric_limits<float>::quiet_NaN());  // key 40
  const AttentionResult r = run_on_device(t, in, 0);
  for (int64_t i = 0; i < 70 * 16; ++i) ASSERT_EQ(std::isnan(r.out[i]), i / 16 >= 40) << i;
  for (int64_t i = 0; i < 70; ++i) ASSERT_EQ(std::isnan(r.lse[i]), i >= 40) << i;
}

// Scores of minus infinity take no part, also when they are all that a row has seen for a while.
TEST(VirtualFlash, KeysThatAreInfinitelyFarTakeNoPart) {
  const AttentionCase t = {1, 100, 1, 16, Dtype::fp32, false, 0};
  Inputs in(t, 0);
  for (int64_t i = 0; i < 100; ++i) {
    for (int64_t d = 0; d < 16; ++d) {
      in.qkv.set(48 * i + d, 1e30f);
      in.qkv.set(48 * i + 16 + d, i < 99 ? -1e30f : 0.0f);
    }
  }
  const AttentionResult r = run_on_device(t, in, 0);
  for (int64_t i = 0; i < 100 * 16; ++i) ASSERT_EQ(r.out[i], in.qkv[48 * 99 + 32 + i % 16]) << i;
}

TEST(VirtualFlash, HeadsThatAreTooLargeAreRefused) {
  const AttentionCase t = {1, 2, 1, 129, Dtype::bf16, true, 0};
  EXPECT_THROW(run_on_device(t, Inputs(t, 0), 0), DeviceError);
}

}  // namespace
}  // namespace shardrun
