// Attention against a double reference, and its gradient against finite differences.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include "tests/kernels/attention_reference.h"
#include "tests/kernels/isa_main.h"

namespace shardrun {
namespace {

using Case = AttentionCase;
using Result = AttentionResult;

Result run(const Case& t, const Array& qkv, const Array& dout, int threads) {
  ThreadPool pool(threads);
  Stream stream(DeviceKind::cpu, test_isa(), &pool);
  Result r = {Array(t.dtype, {t.batch, t.time, t.columns()}),
              Array(Dtype::fp32, {t.batch, t.heads, t.time}),
              Array(t.dtype, {t.batch, t.time, 3 * t.columns()})};
  kernels::attention_forward(r.out.tensor(), r.lse.tensor(), qkv.tensor(), t.options(), stream);
  kernels::attention_backward(r.dqkv.tensor(), dout.tensor(), r.out.tensor(), qkv.tensor(),
                              r.lse.tensor(), t.options(), stream);
  return r;
}

void check(const Case& t) {
  SCOPED_TRACE(fmt::format("B {} T {} H {} D {} {}{} dropout {}", t.batch, t.time, t.heads, t.size,
                           name_of(t.dtype), t.causal ? " causal" : "", t.dropout));
  const Array qkv = Array::normal(t.dtype, {t.batch, t.time, 3 * t.columns()}, 5);
  const Array dout = Array::normal(t.dtype, {t.batch, t.time, t.columns()}, 6);
  const Result r = run(t, qkv, dout, 2);
  for (int threads : {1, 3}) {
    const Result other = run(t, qkv, dout, threads);
    EXPECT_TRUE(r.out.same_bits(other.out)) << threads << " threads give other bits";
    EXPECT_TRUE(r.lse.same_bits(other.lse)) << threads << " threads give other bits";
    EXPECT_TRUE(r.dqkv.same_bits(other.dqkv)) << threads << " threads give other bits";
  }
  check_attention(t, qkv, dout, r);
}

TEST(Attention, MatchesTheReference) {
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (bool causal : {true, false}) {
      for (float dropout : {0.0f, 0.25f}) {
        check({2, 33, 3, 16, dtype, causal, dropout});
        check({1, 130, 2, 64, dtype, causal, dropout});
        check({3, 1, 1, 8, dtype, causal, dropout});
        check({1, 7, 2, 5, dtype, causal, dropout});
      }
    }
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Case t = {1, 70, 1, 16, Dtype::fp32, true, 0};
  const Array qkv = Array::normal(t.dtype, {1, 70, 48}, 5, 100.0f);
  const Array dout = Array::normal(t.dtype, {1, 70, 16}, 6);
  const Result r = run(t, qkv, dout, 1);
  for (int64_t i = 0; i < r.out.numel(); ++i) ASSERT_TRUE(std::isfinite(r.out[i]));
  for (int64_t i = 0; i < r.dqkv.numel(); ++i) ASSERT_TRUE(std::isfinite(r.dqkv[i]));
}

TEST(Attention, GradientIsTheSlopeOfTheForwardPass) {
  for (float dropout : {0.0f, 0.5f}) {
    const Case t = {1, 19, 2, 8, Dtype::fp32, true, dropout};
    const Array qkv = Array::normal(t.dtype, {1, 19, 48}, 5);
    const Array dout = Array::normal(t.dtype, {1, 19, 16}, 6);
    const Result r = run(t, qkv, dout, 1);
    const auto loss = [&](const Array& at) {
      const Result moved = run(t, at, dout, 1);
      double sum = 0;
      for (int64_t i = 0; i < dout.numel(); ++i) sum += moved.out[i] * dout[i];
      return sum;
    };
    for (int64_t i = 0; i < qkv.numel(); i += 5) {
      constexpr float kStep = 1e-2f;
      Array up = qkv, down = qkv;
      up.set(i, static_cast<float>(qkv[i]) + kStep);
      down.set(i, static_cast<float>(qkv[i]) - kStep);
      const double slope = (loss(up) - loss(down)) / (up[i] - down[i]);
      ASSERT_NEAR(r.dqkv[i], slope, 1e-3 * (1 + std::abs(slope))) << "element " << i;
    }
  }
}

TEST(Attention, WrongArgumentsAreRefused) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::meta, test_isa(), &pool);
  const auto call = [&](const Shape& out, const Shape& lse, float dropout) {
    kernels::attention_forward(Tensor(nullptr, Dtype::bf16, out), Tensor(nullptr, Dtype::fp32, lse),
                               ConstTensor(nullptr, Dtype::bf16, {2, 4, 48}),
                               {.heads = 2, .dropout = dropout, .key = {}}, stream);
  };
  EXPECT_NO_THROW(call({2, 4, 16}, {2, 2, 4}, 0));
  EXPECT_GT(stream.work().flops, 0);
  EXPECT_THROW(call({2, 4, 48}, {2, 2, 4}, 0), InternalError);
  EXPECT_THROW(call({2, 4, 16}, {2, 4, 2}, 0), InternalError);
  EXPECT_THROW(call({2, 4, 16}, {2, 2, 4}, 1), InternalError);
}

}  // namespace
}  // namespace shardrun
