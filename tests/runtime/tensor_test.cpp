// Shapes, views, and the names that a person meets: element types, devices, instruction sets.
#include "runtime/tensor.h"

#include <gtest/gtest.h>

#include <vector>

#include "runtime/stream.h"

namespace shardrun {
namespace {

TEST(Shape, CountsElementsRowsAndColumns) {
  struct Row {
    Shape shape;
    int rank;
    int64_t numel, rows, columns;
    const char* text;
  };
  const Row rows[] = {
      {{}, 0, 1, 1, 1, "[]"},
      {{7}, 1, 7, 1, 7, "[7]"},
      {{2, 64, 128}, 3, 16384, 128, 128, "[2, 64, 128]"},
      {{3, 0, 5}, 3, 0, 0, 5, "[3, 0, 5]"},
      {{4, 0}, 2, 0, 4, 0, "[4, 0]"},
      {{1 << 20, 1 << 20}, 2, int64_t{1} << 40, 1 << 20, 1 << 20, "[1048576, 1048576]"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.text);
    EXPECT_EQ(row.shape.rank(), row.rank);
    EXPECT_EQ(row.shape.numel(), row.numel);
    EXPECT_EQ(row.shape.rows(), row.rows);
    EXPECT_EQ(row.shape.columns(), row.columns);
    EXPECT_EQ(row.shape.text(), row.text);
  }
  const Shape shape{2, 3, 5};
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[-1], 5);
  EXPECT_EQ(shape[-3], 2);
}

TEST(Shape, EqualityLooksAtRankAndDimensions) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{3, 2}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{2, 3, 1}));
  EXPECT_FALSE((Shape{}) == (Shape{1}));
  Shape grown{2};
  grown.append(3);
  EXPECT_EQ(grown, (Shape{2, 3}));
}

TEST(Shape, TooManyAndNegativeDimensionsAreRefused) {
  EXPECT_NO_THROW((Shape{1, 1, 1, 1, 1}));
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1}), InternalError);
  EXPECT_THROW((Shape{2, -1}), InternalError);
}

TEST(Tensor, ViewsShareMemory) {
  std::vector<float> data(24);
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  const Tensor whole(data.data(), Dtype::fp32, {2, 3, 4});
  EXPECT_EQ(whole.numel(), 24);
  EXPECT_EQ(whole.bytes(), 96u);

  const Tensor part = whole.flat(5, 7);
  EXPECT_EQ(part.shape(), (Shape{7}));
  EXPECT_EQ(part.as<float>()[0], 5);
  part.as<float>()[6] = -1;
  EXPECT_EQ(data[11], -1);

  const Tensor table = whole.reshaped({6, 4});
  EXPECT_EQ(table.data(), whole.data());
  EXPECT_EQ(table.shape(), (Shape{6, 4}));

  std::vector<uint16_t> small(10);
  const ConstTensor half(small.data(), Dtype::bf16, {10});
  EXPECT_EQ(half.flat(3, 2).data(), small.data() + 3) << "offsets are in elements";
  EXPECT_EQ(half.bytes(), 20u);
}

TEST(Tensor, RangesAndShapesThatDoNotFitAreRefused) {
  std::vector<float> data(12);
  const Tensor whole(data.data(), Dtype::fp32, {3, 4});
  EXPECT_NO_THROW(whole.flat(0, 12));
  EXPECT_NO_THROW(whole.flat(12, 0));
  EXPECT_THROW(whole.flat(6, 7), InternalError);
  EXPECT_THROW(whole.flat(-1, 2), InternalError);
  EXPECT_THROW(whole.flat(2, -1), InternalError);
  EXPECT_NO_THROW(whole.reshaped({2, 6}));
  EXPECT_THROW(whole.reshaped({5, 2}), InternalError);
}

TEST(Tensor, ReadingAnotherTypeNamesBoth) {
  std::vector<float> data(3);
  const Tensor tensor(data.data(), Dtype::fp32, {3});
  try {
    tensor.as<int32_t>();
    FAIL() << "read as another type";
  } catch (const InternalError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("fp32"), std::string::npos) << what;
    EXPECT_NE(what.find("int32"), std::string::npos) << what;
  }
}

// On `meta` pointers are null, but a tensor is there all the same.
TEST(Tensor, AbsentIsNotTheSameAsWithoutMemory) {
  const Tensor absent;
  EXPECT_FALSE(absent.present());
  EXPECT_FALSE(static_cast<bool>(absent));
  EXPECT_EQ(absent.numel(), 0);
  EXPECT_EQ(absent.bytes(), 0u);
  const Tensor meta(nullptr, Dtype::fp16, {4, 4});
  EXPECT_TRUE(meta.present());
  EXPECT_EQ(meta.bytes(), 32u);
  EXPECT_EQ(meta.flat(8, 8).data(), nullptr) << "an offset made an address out of nothing";
  EXPECT_TRUE(meta.reshaped({16}).present());
}

TEST(Dtype, SizesAndNames) {
  struct Row {
    Dtype dtype;
    size_t size;
    const char* name;
    bool floating;
  };
  const Row rows[] = {
      {Dtype::fp32, 4, "fp32", true},    {Dtype::bf16, 2, "bf16", true},
      {Dtype::fp16, 2, "fp16", true},    {Dtype::fp64, 8, "fp64", true},
      {Dtype::int32, 4, "int32", false}, {Dtype::int64, 8, "int64", false},
      {Dtype::uint16, 2, "uint16", false}, {Dtype::uint8, 1, "uint8", false},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(size_of(row.dtype), row.size) << row.name;
    EXPECT_STREQ(name_of(row.dtype), row.name);
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
  }
}

TEST(Isa, NamesGoBothWays) {
  const Isa best = detect_isa();
  EXPECT_EQ(isa_from_name("auto"), best);
  EXPECT_EQ(isa_from_name("baseline"), Isa::baseline);
  for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx}) {
    SCOPED_TRACE(name_of(isa));
    if (isa <= best) {
      EXPECT_EQ(isa_from_name(name_of(isa)), isa);
      continue;
    }
    try {
      isa_from_name(name_of(isa));
      FAIL() << "more than this processor has";
    } catch (const DeviceError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(name_of(isa)), std::string::npos) << what;
      EXPECT_NE(what.find(name_of(best)), std::string::npos) << what;
    }
  }
}

TEST(Isa, AnUnknownNameListsTheKnownOnes) {
  for (const char* name : {"sse9", "", "AVX2", "avx512 "}) {
    try {
      isa_from_name(name);
      FAIL() << "'" << name << "' taken";
    } catch (const UsageError& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find(fmt::format("'{}'", name)), std::string::npos) << what;
      for (const char* known : {"auto", "baseline", "avx2", "avx512", "avx512_bf16", "amx"}) {
        EXPECT_NE(what.find(known), std::string::npos) << what;
      }
    }
  }
}

TEST(Stream, CountsWorkAndComputesOnTheCpuOnly) {
  ThreadPool pool(1);
  Stream cpu(DeviceKind::cpu, Isa::baseline, &pool), meta(DeviceKind::meta, Isa::baseline, &pool);
  EXPECT_STREQ(name_of(cpu.kind()), "cpu");
  EXPECT_STREQ(name_of(meta.kind()), "meta");
  EXPECT_TRUE(cpu.computes());
  EXPECT_FALSE(meta.computes());
  cpu.set_idle(true);
  EXPECT_FALSE(cpu.computes());
  cpu.set_idle(false);
  EXPECT_TRUE(cpu.computes());
  cpu.count(10, 3);
  cpu.count(5, 4);
  EXPECT_EQ(cpu.work().flops, 15);
  EXPECT_EQ(cpu.work().bytes, 7);
}

}  // namespace
}  // namespace shardrun
