// Matrix products against sums in double.
#include "kernels/matmul.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include "tests/kernels/isa_main.h"
#include "tests/kernels/reference.h"

namespace shardrun {
namespace {

using kernels::Transpose;

struct Case {
  int64_t m, n, k;
  Dtype dtype, c_dtype;
  bool transpose_a, transpose_b, bias, accumulate;
};

Shape stored(int64_t rows, int64_t columns, bool transpose) {
  return transpose ? Shape{columns, rows} : Shape{rows, columns};
}

class Matmul : public testing::Test {
 protected:
  Array a_, b_, bias_, before_;
  explicit Matmul()
      : a_(Dtype::fp32, {}),
        b_(Dtype::fp32, {}),
        bias_(Dtype::fp32, {}),
        before_(Dtype::fp32, {}) {}

  Array run(const Case& t, int threads) {
    ThreadPool pool(threads);
    Stream stream(DeviceKind::cpu, test_isa(), &pool);
    Array c = before_;
    kernels::matmul(c.tensor(), a_.tensor(), Transpose{t.transpose_a}, b_.tensor(),
                    Transpose{t.transpose_b}, t.bias ? bias_.tensor() : ConstTensor(), t.accumulate,
                    stream);
    EXPECT_EQ(stream.work().flops, 2.0 * static_cast<double>(t.m * t.n * t.k));
    return c;
  }

  void check(const Case& t) {
    SCOPED_TRACE(fmt::format("{}x{}x{} {} -> {}{}{}{}{}", t.m, t.n, t.k, name_of(t.dtype),
                             name_of(t.c_dtype), t.transpose_a ? " ta" : "",
                             t.transpose_b ? " tb" : "", t.bias ? " bias" : "",
                             t.accumulate ? " accumulate" : ""));
    a_ = Array::normal(t.dtype, stored(t.m, t.k, t.transpose_a), 1);
    b_ = Array::normal(t.dtype, stored(t.k, t.n, t.transpose_b), 2);
    bias_ = Array::normal(t.dtype, {t.n}, 3);
    before_ = Array::normal(t.c_dtype, {t.m, t.n}, 4);
    const Array c = run(t, 2);
    EXPECT_TRUE(c.same_bits(run(t, 1))) << "one thread gives other bits";
    EXPECT_TRUE(c.same_bits(run(t, 3))) << "three threads give other bits";

    for (int64_t i = 0; i < t.m; ++i) {
      for (int64_t j = 0; j < t.n; ++j) {
        double want = 0, size = 0;
        for (int64_t p = 0; p < t.k; ++p) {
          const double product = a_[t.transpose_a ? p * t.m + i : i * t.k + p] *
                                 b_[t.transpose_b ? j * t.k + p : p * t.n + j];
          want += product;
          size += std::abs(product);
        }
        for (double x : {t.bias ? bias_[j] : 0.0, t.accumulate ? before_[i * t.n + j] : 0.0}) {
          want += x;
          size += std::abs(x);
        }
        const double bound = 2 * static_cast<double>(t.k + 2) * 0x1p-24 * size +
                             unit_roundoff(t.c_dtype) * std::abs(want) * 1.01;
        const double got = c[i * t.n + j];
        ASSERT_LE(std::abs(got - want), bound) << "at " << i << ", " << j << " got " << got;
      }
    }
  }
};

TEST_F(Matmul, EveryKindOfProductIsRight) {
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (Dtype c_dtype : {Dtype::fp32, dtype}) {
      for (int flags = 0; flags < 16; ++flags) {
        const bool accumulate = flags & 8;
        if (accumulate && c_dtype != Dtype::fp32) continue;
        check({37, 53, 29, dtype, c_dtype, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0,
               accumulate});
      }
    }
  }
}

TEST_F(Matmul, EverySizeIsRight) {
  const int64_t sizes[][3] = {{1, 1, 1},      {1, 7, 1},      {7, 1, 13},    {1, 300, 65},
                              {2, 3, 0},      {0, 5, 3},      {5, 0, 3},     {0, 0, 0},
                              {64, 64, 64},   {128, 256, 96}, {257, 131, 3}, {61, 1, 17},
                              {513, 300, 70}, {33, 31, 1100}, {300, 270, 230}, {1030, 65, 260}};
  for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (const auto& s : sizes) {
      check({s[0], s[1], s[2], dtype, dtype, false, false, true, false});
      check({s[0], s[1], s[2], dtype, dtype, false, true, false, false});
      check({s[0], s[1], s[2], dtype, Dtype::fp32, true, false, false, true});
    }
  }
}

// Rounding the product and then adding the bias would round twice.
TEST_F(Matmul, BiasIsAddedBeforeTheOnlyRounding) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    a_ = Array(dtype, {1, 2});
    b_ = Array(dtype, {2, 1});
    bias_ = Array(dtype, {1});
    before_ = Array(dtype, {1, 1});
    const float tiny = static_cast<float>(unit_roundoff(dtype));
    a_.set(0, 1.0f);
    a_.set(1, tiny);
    b_.set(0, 1.0f);
    b_.set(1, 1.0f);
    bias_.set(0, -1.0f);
    EXPECT_EQ(run({1, 1, 2, dtype, dtype, false, false, true, false}, 1)[0], tiny);
  }
}

TEST_F(Matmul, HigherRanksAreRowsAndColumns) {
  a_ = Array::normal(Dtype::fp32, {2, 3, 5}, 1);
  b_ = Array::normal(Dtype::fp32, {5, 4}, 2);
  before_ = Array(Dtype::fp32, {2, 3, 4});
  const Array c = run({6, 4, 5, Dtype::fp32, Dtype::fp32, false, false, false, false}, 1);
  double want = 0;
  for (int64_t p = 0; p < 5; ++p) want += a_[5 * 5 + p] * b_[p * 4 + 3];
  EXPECT_NEAR(c[5 * 4 + 3], want, 1e-5);
}

// [Note: signals] A handler that starts inside a generated product writes over the heap before its
// buffer: blocks of many sizes come and go there and must keep what they hold.
TEST_F(Matmul, SignalsLeaveTheHeapAlone) {
  const Case t{128, 128, 512, Dtype::fp32, Dtype::fp32, false, false, false, false};
  a_ = Array::normal(t.dtype, {t.m, t.k}, 1);
  b_ = Array::normal(t.dtype, {t.k, t.n}, 2);
  before_ = Array(t.c_dtype, {t.m, t.n});
  const Array want = run(t, 1);
  ThreadPool pool(1);
  Stream stream(DeviceKind::cpu, test_isa(), &pool);

  static volatile sig_atomic_t handled;
  handled = 0;
  struct sigaction action {}, action_before;
  action.sa_handler = [](int) { handled = handled + 1; };
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, &action_before);
  const itimerval often{{0, 100}, {0, 100}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  std::vector<std::vector<unsigned char>> blocks(64);
  int64_t rounds = 0, torn = 0, wrong = 0;
  for (; handled < 1000; ++rounds) {
    std::vector<unsigned char>& block = blocks[rounds % 64];
    for (unsigned char byte : block) torn += byte != 0x5a;
    block = std::vector<unsigned char>(64 + rounds * 97 % 8000, 0x5a);
    Array c = before_;
    kernels::matmul(c.tensor(), a_.tensor(), Transpose::no, b_.tensor(), Transpose::no, {}, false,
                    stream);
    wrong += !c.same_bits(want);
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &action_before, nullptr);
  EXPECT_EQ(torn, 0) << "bytes of " << rounds << " blocks";
  EXPECT_EQ(wrong, 0) << "of " << rounds << " products";
}

TEST_F(Matmul, WrongArgumentsAreRefused) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::meta, test_isa(), &pool);
  const auto call = [&](Dtype c, const Shape& shape, Dtype a, Dtype b, bool accumulate) {
    kernels::matmul(Tensor(nullptr, c, shape), ConstTensor(nullptr, a, {3, 4}), Transpose::no,
                    ConstTensor(nullptr, b, {4, 5}), Transpose::no, {}, accumulate, stream);
  };
  EXPECT_NO_THROW(call(Dtype::bf16, {3, 5}, Dtype::bf16, Dtype::bf16, false));
  EXPECT_EQ(stream.work().bytes, 2.0 * (12 + 20 + 15));
  EXPECT_THROW(call(Dtype::bf16, {3, 4}, Dtype::bf16, Dtype::bf16, false), InternalError);
  EXPECT_THROW(call(Dtype::bf16, {3, 5}, Dtype::bf16, Dtype::fp32, false), InternalError);
  EXPECT_THROW(call(Dtype::bf16, {3, 5}, Dtype::fp32, Dtype::fp32, false), InternalError);
  EXPECT_THROW(call(Dtype::bf16, {3, 5}, Dtype::bf16, Dtype::bf16, true), InternalError);
}

}  // namespace
}  // namespace shardrun
