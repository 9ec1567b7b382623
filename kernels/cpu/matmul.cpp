// Cuts a matrix product into tiles of rows and columns, by shape alone, and gives each tile to one
// thread: the number of threads does not change bits. The shared dimension is never split between
// tasks.
#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/tiles.h"

namespace shardrun::cpu {
namespace {

// Operands are widened this much of the shared dimension at a time, to stay in a core's cache.
constexpr int64_t kStretch = 1024;

// A stored matrix: where it is, and its leading dimension.
struct Matrix {
  char* data;
  Dtype dtype;
  int64_t ld;

  Matrix(ConstTensor t)  // NOLINT: implicit on purpose
      : data(static_cast<char*>(const_cast<void*>(t.data()))),
        dtype(t.dtype()),
        ld(t.shape().columns()) {}
  void* at(int64_t row, int64_t column) const {
    return data + (row * ld + column) * static_cast<int64_t>(size_of(dtype));
  }
  template <typename T>
  T* at(int64_t row, int64_t column) const {
    return static_cast<T*>(at(row, column));
  }
};

struct Product {
  Matrix c, a, b;
  ConstTensor bias;
  int64_t m, n, k;
  bool transpose_a, transpose_b, accumulate;
  bool bf16;  // multiplied as such
  Isa isa;
  const Tiles& tiles;
};

// Rows [row, row + rows) and columns [column, column + columns) of c.
struct Tile {
  int64_t row, column, rows, columns;
};

// A tile of 256 x 256 comes near to oneDNN's peak; products with few of them take smaller ones, so
// that there is work for several threads, unless they are hardly worth waking them. In bf16 tiles of
// full width are preferred where both operands are then dense: oneDNN's fastest kernel wants that.
struct TileSize {
  int64_t rows = 256, columns = 256;
};

TileSize tile_size(const Product& p) {
  constexpr int64_t kWanted = 16, kSmallest = 64, kWide = 1024;
  const int64_t one_tile = p.bf16 ? int64_t{1} << 24 : int64_t{1} << 21;  // multiplications
  if (p.m <= kWide && p.n <= kWide && p.m * p.n * p.k <= one_tile) return {p.m, p.n};
  if (p.bf16 && !p.transpose_a && !p.transpose_b && p.n <= kWide) return {128, p.n};
  TileSize size;
  const auto tiles = [&] {
    return ((p.m + size.rows - 1) / size.rows) * ((p.n + size.columns - 1) / size.columns);
  };
  while (tiles() < kWanted && std::max(size.rows, size.columns) > kSmallest) {
    (size.rows >= size.columns ? size.rows : size.columns) /= 2;
  }
  return size;
}

// Sets rows to the bias (zero without one), or adds it to them.
void start_rows(float* c, int64_t ldc, const float* bias, const Tile& t, bool add,
                const Tiles& tiles) {
  for (int64_t i = 0; i < t.rows; ++i) {
    float* row = c + i * ldc;
    if (!add && bias != nullptr) std::copy_n(bias, t.columns, row);
    if (!add && bias == nullptr) std::fill_n(row, t.columns, 0.0f);
    if (add && bias != nullptr) tiles.add(row, bias, t.columns);
  }
}

// fp32 needs no packing: oneDNN is as fast on views.
void tile_fp32(const Product& p, const Tile& t, const float* bias) {
  float* c = p.c.at<float>(t.row, t.column);
  const bool start = bias != nullptr || p.k == 0;
  if (start) start_rows(c, p.c.ld, bias, t, p.accumulate, p.tiles);
  if (p.k == 0) return;
  const float* a = p.transpose_a ? p.a.at<float>(0, t.row) : p.a.at<float>(t.row, 0);
  const float* b = p.transpose_b ? p.b.at<float>(t.column, 0) : p.b.at<float>(0, t.column);
  gemm_fp32({t.rows, t.columns, p.k, p.transpose_a, p.transpose_b, p.a.ld, p.b.ld, p.c.ld}, c, a, b,
            start || p.accumulate, p.isa);
}

// A block of a stored 16-bit matrix, widened into dense rows.
const float* widen_block(float* out, const Matrix& from, int64_t row, int64_t rows, int64_t column,
                         int64_t columns, const Tiles& tiles) {
  for (int64_t i = 0; i < rows; ++i) {
    tiles.widen(out + i * columns, from.at(row + i, column), from.dtype, columns);
  }
  return out;
}

void sum_widened(const Product& p, const Tile& t, float* sums, bool add, float* room_a,
                 float* room_b) {
  for (int64_t begin = 0; begin < p.k; begin += kStretch, add = true) {
    const int64_t k = std::min(kStretch, p.k - begin);
    const float* a = p.transpose_a ? widen_block(room_a, p.a, begin, k, t.row, t.rows, p.tiles)
                                   : widen_block(room_a, p.a, t.row, t.rows, begin, k, p.tiles);
    const float* b = p.transpose_b
                         ? widen_block(room_b, p.b, t.column, t.columns, begin, k, p.tiles)
                         : widen_block(room_b, p.b, begin, k, t.column, t.columns, p.tiles);
    const int64_t lda = p.transpose_a ? t.rows : k, ldb = p.transpose_b ? k : t.columns;
    gemm_fp32({t.rows, t.columns, k, p.transpose_a, p.transpose_b, lda, ldb, t.columns}, sums, a, b,
              add, p.isa);
  }
}

// 16-bit operands: summed in fp32 scratch, rounded or added to c at the end. `room` holds the sums,
// then the two widened operands. bf16 that oneDNN multiplies stays where it is: its copies into dense
// memory were measured to cost as much as its faster kernel for dense matrices saves.
void tile_16bit(const Product& p, const Tile& t, const float* bias, float* room) {
  float* sums = room;
  const bool add = bias != nullptr || p.k == 0;
  if (add) start_rows(sums, t.columns, bias, t, false, p.tiles);
  if (!p.bf16) {
    float* room_a = sums + t.rows * t.columns;
    sum_widened(p, t, sums, add, room_a, room_a + t.rows * kStretch);
  } else if (p.k > 0) {
    const Bf16* a = p.transpose_a ? p.a.at<Bf16>(0, t.row) : p.a.at<Bf16>(t.row, 0);
    const Bf16* b = p.transpose_b ? p.b.at<Bf16>(t.column, 0) : p.b.at<Bf16>(0, t.column);
    gemm_bf16({t.rows, t.columns, p.k, p.transpose_a, p.transpose_b, p.a.ld, p.b.ld, t.columns},
              sums, a, b, add, p.isa);
  }
  for (int64_t i = 0; i < t.rows; ++i) {
    const float* from = sums + i * t.columns;
    if (p.accumulate) {
      p.tiles.add(p.c.at<float>(t.row + i, t.column), from, t.columns);
    } else {
      p.tiles.narrow(p.c.at(t.row + i, t.column), from, p.c.dtype, t.columns);
    }
  }
}

}  // namespace

void matmul(Tensor c, ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b,
            ConstTensor bias, bool accumulate, Stream& stream) {
  const Product p = {c,
                     a,
                     b,
                     bias,
                     c.shape().rows(),
                     c.shape().columns(),
                     transpose_a ? a.shape().rows() : a.shape().columns(),
                     transpose_a,
                     transpose_b,
                     accumulate,
                     a.dtype() == Dtype::bf16 && has_gemm_bf16(stream.isa()),
                     stream.isa(),
                     tiles_of(stream.isa())};
  if (p.m == 0 || p.n == 0) return;
  const TileSize size = tile_size(p);
  const int64_t down = (p.m + size.rows - 1) / size.rows;
  const int64_t across = (p.n + size.columns - 1) / size.columns;
  const bool in_place = a.dtype() == Dtype::fp32;

  // A thread's scratch, in floats: the bias, then what tile_16bit wants.
  int64_t room = bias.present() ? size.columns : 0;
  if (!in_place) room += size.rows * size.columns;
  if (!in_place && !p.bf16) room += (size.rows + size.columns) * kStretch;
  stream.pool().run(down * across, [&](int64_t task, int thread) {
    Tile t = {task % down * size.rows, task / down * size.columns, size.rows, size.columns};
    t.rows = std::min(t.rows, p.m - t.row);
    t.columns = std::min(t.columns, p.n - t.column);
    float* memory = nullptr;
    if (room > 0) {
      memory = static_cast<float*>(
          stream.pool().scratch(thread, static_cast<size_t>(room) * sizeof(float)));
    }
    float* bias_fp32 = nullptr;
    if (p.bias.present()) {
      bias_fp32 = memory;
      memory += size.columns;
      const char* from = static_cast<const char*>(p.bias.data());
      p.tiles.widen(bias_fp32, from + t.column * static_cast<int64_t>(size_of(p.bias.dtype())),
                    p.bias.dtype(), t.columns);
    }
    if (in_place) {
      tile_fp32(p, t, bias_fp32);
    } else {
      tile_16bit(p, t, bias_fp32, memory);
    }
  });
}

}  // namespace shardrun::cpu
