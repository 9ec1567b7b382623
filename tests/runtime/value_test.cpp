// Values: memory goes with the last handle, gradients add up whatever the number of uses.
#include "runtime/value.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/reference.h"

namespace shardrun {
namespace {

int adds = 0, casts = 0;

// Adds in fp32 and rounds once, like the kernel.
void add(Tensor out, ConstTensor a, ConstTensor b, Stream&) {
  ++adds;
  for (int64_t i = 0; i < out.numel(); ++i) {
    set(out.data(), out.dtype(), i,
        static_cast<float>(get(a.data(), a.dtype(), i)) +
            static_cast<float>(get(b.data(), b.dtype(), i)));
  }
}
void cast(Tensor out, ConstTensor in, Stream&) {
  ++casts;
  for (int64_t i = 0; i < out.numel(); ++i) {
    set(out.data(), out.dtype(), i, static_cast<float>(get(in.data(), in.dtype(), i)));
  }
}

// Heap memory that knows how many blocks are out.
class CountingMemory : public Memory {
 public:
  void begin(const char*) override {}
  void end() override {}
  int alive = 0;

 private:
  Buffer do_allocate(size_t bytes, const char*) override {
    ++alive;
    return Buffer(this, ::operator new(std::max<size_t>(bytes, 1)), bytes, 0);
  }
  void do_free(const Buffer& buffer) override {
    --alive;
    ::operator delete(buffer.data());
  }
};

class ValueTest : public testing::Test {
 protected:
  ValueTest()
      : threads_(1),
        stream_(DeviceKind::cpu, Isa::baseline, &threads_),
        pool_(memory_, stream_, {add, cast}) {
    adds = casts = 0;
  }
  ~ValueTest() override {
    EXPECT_EQ(pool_.live(), 0);
    EXPECT_EQ(memory_.alive, 0);
  }

  Value make(Dtype dtype, float x) {
    Value value = pool_.make(dtype, {3}, "test");
    for (int i = 0; i < 3; ++i) set(value.tensor().data(), dtype, i, x);
    return value;
  }
  static double read(const Value& value) { return get(value.tensor().data(), value.dtype(), 2); }

  CountingMemory memory_;
  ThreadPool threads_;
  Stream stream_;
  ValuePool pool_;
};

TEST_F(ValueTest, CopiesShareAndTheLastOneFrees) {
  Value a = make(Dtype::fp32, 1);
  EXPECT_EQ(memory_.alive, 1);
  Value b = a;
  EXPECT_TRUE(a.same_as(b));
  EXPECT_EQ(a.tensor().data(), b.tensor().data());
  a = Value();
  EXPECT_EQ(memory_.alive, 1);
  EXPECT_EQ(read(b), 1);
  Value c = std::move(b);
  EXPECT_FALSE(b);
  EXPECT_EQ(memory_.alive, 1);
  Value& self = c;
  c = self;
  EXPECT_EQ(memory_.alive, 1) << "assigning a Value to itself freed it";
  c = make(Dtype::fp32, 2);
  EXPECT_EQ(memory_.alive, 1) << "the overwritten Value's memory stays";
  EXPECT_EQ(pool_.live(), 1);
}

TEST_F(ValueTest, AnEmptyValueCannotBeRead) {
  EXPECT_FALSE(Value());
  EXPECT_THROW(Value().tensor(), InternalError);
}

TEST_F(ValueTest, AnIdOutlivesTheMemory) {
  Value value = pool_.make(Dtype::bf16, {4, 5}, "test");
  ValueId id = value;
  value = Value();
  EXPECT_EQ(memory_.alive, 0);
  EXPECT_EQ(pool_.live(), 1);
  EXPECT_EQ(id.shape(), (Shape{4, 5}));
  EXPECT_EQ(id.dtype(), Dtype::bf16);
  ValueId copy = id;
  id = ValueId();
  pool_.count_use(copy);
  pool_.add_gradient(copy, make(Dtype::bf16, 3));
  EXPECT_EQ(read(pool_.take_gradient(copy)), 3);
}

// A gradient that nobody takes goes with its Value.
TEST_F(ValueTest, AForgottenGradientIsFreed) {
  Value value = make(Dtype::fp32, 1);
  pool_.count_use(value);
  pool_.add_gradient(value, make(Dtype::fp32, 3));
  EXPECT_EQ(memory_.alive, 2);
  value = Value();
  EXPECT_EQ(memory_.alive, 0);
}

// A recycled slot starts anew.
TEST_F(ValueTest, NothingIsInherited) {
  Value value = make(Dtype::fp16, 1);
  for (int i = 0; i < 3; ++i) pool_.count_use(value);
  pool_.add_gradient(value, make(Dtype::fp16, 3));
  value = Value();
  value = make(Dtype::fp16, 2);
  for (int i = 0; i < 2; ++i) pool_.count_use(value);
  for (int i = 0; i < 2; ++i) pool_.add_gradient(value, make(Dtype::fp16, 1));
  EXPECT_EQ(read(pool_.take_gradient(value)), 2);
  EXPECT_EQ(casts, 0);
}

TEST_F(ValueTest, AnAliasSharesMemoryAndNotGradients) {
  Value base = make(Dtype::fp32, 5);
  Value alias = pool_.alias(base);
  EXPECT_FALSE(alias.same_as(base));
  EXPECT_EQ(alias.tensor().data(), base.tensor().data());
  pool_.count_use(alias);
  pool_.add_gradient(alias, make(Dtype::fp32, 1));
  EXPECT_FALSE(pool_.take_gradient(base));
  EXPECT_EQ(read(pool_.take_gradient(alias)), 1);
  base = Value();
  EXPECT_EQ(read(alias), 5) << "an alias keeps the memory";
  const Value second = pool_.alias(alias);
  alias = Value();
  EXPECT_EQ(read(second), 5);
  EXPECT_EQ(memory_.alive, 1);
}

TEST_F(ValueTest, WrappedMemoryIsNotFreed) {
  std::vector<int32_t> tokens = {1, 2, 3};
  Value value = pool_.wrap({tokens.data(), Dtype::int32, {3}});
  EXPECT_EQ(value.tensor().as<int32_t>(), tokens.data());
  EXPECT_EQ(memory_.alive, 0);
}

TEST_F(ValueTest, OneGradientIsTakenAsItIs) {
  const Value value = make(Dtype::bf16, 1);
  pool_.count_use(value);
  const Value gradient = make(Dtype::bf16, 7);
  pool_.add_gradient(value, gradient);
  EXPECT_TRUE(pool_.take_gradient(value).same_as(gradient));
  EXPECT_FALSE(pool_.take_gradient(value)) << "taken twice";
  EXPECT_EQ(adds + casts, 0);
}

// 1 + 2^-8 is no bf16 and 1 + 2^-11 no fp16: a sum that is rounded on the way loses all the small
// ones.
TEST_F(ValueTest, SumsAreRoundedOnce) {
  for (Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
    const float small = static_cast<float>(unit_roundoff(dtype));
    for (int uses : {2, 3, 5, 9}) {
      SCOPED_TRACE(fmt::format("{} used {} times", name_of(dtype), uses));
      adds = casts = 0;
      const Value value = make(dtype, 0);
      for (int i = 0; i < uses; ++i) pool_.count_use(value);
      pool_.add_gradient(value, make(dtype, 1));
      for (int i = 1; i < uses; ++i) pool_.add_gradient(value, make(dtype, small));
      const Value sum = pool_.take_gradient(value);
      ASSERT_EQ(sum.dtype(), dtype);
      Array want(dtype, {1});
      want.set(0, 1 + static_cast<float>(uses - 1) * small);
      EXPECT_EQ(read(sum), want[0]);
      EXPECT_EQ(adds, uses - 1);
      EXPECT_EQ(casts, 0) << "the last addition rounds";
    }
  }
}

// Gradients are shared: `add` hands one to both of its inputs.
TEST_F(ValueTest, GradientsThatArriveAreNotWrittenTo) {
  const Value shared = make(Dtype::fp32, 1), a = make(Dtype::fp32, 0), b = make(Dtype::fp32, 0);
  for (int i = 0; i < 3; ++i) pool_.count_use(a);
  pool_.count_use(b);
  for (int i = 0; i < 3; ++i) pool_.add_gradient(a, shared);
  pool_.add_gradient(b, shared);
  EXPECT_EQ(read(pool_.take_gradient(a)), 3);
  EXPECT_EQ(read(pool_.take_gradient(b)), 1);
  EXPECT_EQ(read(shared), 1);
}

TEST_F(ValueTest, AUseMayGiveNoGradient) {
  const float small = 0x1p-8f;
  const Value value = make(Dtype::bf16, 0);
  for (int arriving : {0, 1, 2, 3}) {
    SCOPED_TRACE(arriving);
    casts = 0;
    for (int i = 0; i < 4; ++i) pool_.count_use(value);
    if (arriving > 0) pool_.add_gradient(value, make(Dtype::bf16, 1));
    for (int i = 1; i < arriving; ++i) pool_.add_gradient(value, make(Dtype::bf16, small));
    const Value sum = pool_.take_gradient(value);
    if (arriving == 0) {
      EXPECT_FALSE(sum);
      continue;
    }
    ASSERT_EQ(sum.dtype(), Dtype::bf16);
    EXPECT_EQ(casts, arriving > 1 ? 1 : 0);
    EXPECT_EQ(read(sum), arriving == 3 ? 1 + 0x1p-7 : 1) << "ties go to even";
  }
}

TEST_F(ValueTest, GradientsMoveToARecomputedValue) {
  const Value old = make(Dtype::bf16, 0);
  for (int i = 0; i < 2; ++i) pool_.count_use(old);
  pool_.add_gradient(old, make(Dtype::bf16, 1));
  pool_.add_gradient(old, make(Dtype::bf16, 2));
  const Value fresh = make(Dtype::bf16, 0);
  pool_.count_use(fresh);  // inside the unit that ran again
  pool_.move_gradient(old, fresh);
  pool_.add_gradient(fresh, make(Dtype::bf16, 4));
  EXPECT_EQ(read(pool_.take_gradient(fresh)), 7);
  EXPECT_FALSE(pool_.take_gradient(old));
}

// A unit may return one Value twice: the second move finds nothing and must not undo the first.
TEST_F(ValueTest, MovingTwiceKeepsTheGradient) {
  const Value old = make(Dtype::fp32, 0), fresh = make(Dtype::fp32, 0);
  pool_.count_use(old);
  pool_.add_gradient(old, make(Dtype::fp32, 3));
  pool_.move_gradient(old, fresh);
  pool_.move_gradient(old, fresh);
  const Value gradient = pool_.take_gradient(fresh);
  ASSERT_TRUE(gradient);
  EXPECT_EQ(read(gradient), 3);
}

TEST_F(ValueTest, SlotsAreReused) {
  for (int i = 0; i < 1000; ++i) {
    Value a = make(Dtype::fp32, 1), b = pool_.alias(a);
    const ValueId id = b;
    EXPECT_EQ(pool_.live(), 2);
  }
  EXPECT_EQ(pool_.live(), 0);
}

TEST(FixedList, HoldsFourAndSaysSo) {
  FixedList<int> list;
  for (int i = 0; i < 4; ++i) list.push(i);
  EXPECT_EQ(list.size(), 4);
  EXPECT_THROW(list.push(4), InternalError);
  list.clear();
  EXPECT_EQ(list.size(), 0);
  Values none;
  EXPECT_THROW(static_cast<Value>(none), InternalError);
}

}  // namespace
}  // namespace shardrun
