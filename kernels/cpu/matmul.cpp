// Cuts a matrix product into tiles of rows and columns, by shape alone, and gives each tile to one
// thread: the number of threads does not change bits. The shared dimension is never split between
// tasks.
#include "kernels/cpu/matmul.h"

#include <algorithm>

#include "kernels/cpu/onednn.h"
#include "kernels/cpu/tiles.h"

namespace shardrun::cpu {
namespace {

// 16-bit operands are widened this much of the shared dimension at a time.
constexpr int64_t kWidened = 1024;

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
  Isa isa;
};

// Rows [row, row + rows) and columns [column, column + columns) of c.
struct Tile {
  int64_t row, column, rows, columns;
};

// A tile of 256 x 256 reaches oneDNN's peak within a few percent; products with few of them take
// smaller ones, so that there is work for several threads.
struct TileSize {
  int64_t rows = 256, columns = 256;
};

TileSize tile_size(int64_t m, int64_t n) {
  constexpr int64_t kWanted = 16, kSmallest = 64;
  TileSize size;
  const auto tiles = [&] {
    return ((m + size.rows - 1) / size.rows) * ((n + size.columns - 1) / size.columns);
  };
  while (tiles() < kWanted && std::max(size.rows, size.columns) > kSmallest) {
    (size.rows >= size.columns ? size.rows : size.columns) /= 2;
  }
  return size;
}

// Copies a block of a stored matrix into fp32.
void widen_block(float* out, const Matrix& from, int64_t row, int64_t rows, int64_t column,
                 int64_t columns, const Tiles& tiles) {
  for (int64_t i = 0; i < rows; ++i) {
    tiles.widen(out + i * columns, from.at(row + i, column), from.dtype, columns);
  }
}

// Sets rows of c to the bias, or adds the bias to them.
void start_rows(float* c, int64_t ldc, const float* bias, int64_t rows, int64_t columns, bool add) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = c + i * ldc;
    for (int64_t j = 0; j < columns; ++j) {
      const float start = bias != nullptr ? bias[j] : 0.0f;
      row[j] = add ? row[j] + start : start;
    }
  }
}

// fp32 in place, or 16-bit operands widened into scratch a stretch of the shared dimension at a time.
void tile_fp32(const Product& p, const Tile& t, const float* bias, float* scratch,
               const Tiles& tiles) {
  const bool narrow = p.c.dtype != Dtype::fp32;
  float* c = narrow ? scratch : p.c.at<float>(t.row, t.column);
  const int64_t ldc = narrow ? t.columns : p.c.ld;

  const bool start = bias != nullptr || p.k == 0;
  if (start) start_rows(c, ldc, bias, t.rows, t.columns, p.accumulate);
  bool add = start || p.accumulate;
  if (p.a.dtype == Dtype::fp32) {
    if (p.k > 0) {
      const float* a = p.transpose_a ? p.a.at<float>(0, t.row) : p.a.at<float>(t.row, 0);
      const float* b = p.transpose_b ? p.b.at<float>(t.column, 0) : p.b.at<float>(0, t.column);
      gemm_fp32({t.rows, t.columns, p.k, p.transpose_a, p.transpose_b, p.a.ld, p.b.ld, ldc}, c, a,
                b, add, p.isa);
    }
    return;
  }
  for (int64_t begin = 0; begin < p.k; begin += kWidened) {
    const int64_t k = std::min(kWidened, p.k - begin);
    float* a_wide = scratch + t.rows * t.columns;
    float* b_wide = a_wide + t.rows * k;
    if (p.transpose_a) {
      widen_block(a_wide, p.a, begin, k, t.row, t.rows, tiles);
    } else {
      widen_block(a_wide, p.a, t.row, t.rows, begin, k, tiles);
    }
    if (p.transpose_b) {
      widen_block(b_wide, p.b, t.column, t.columns, begin, k, tiles);
    } else {
      widen_block(b_wide, p.b, begin, k, t.column, t.columns, tiles);
    }
    gemm_fp32({t.rows, t.columns, k, p.transpose_a, p.transpose_b, p.transpose_a ? t.rows : k,
               p.transpose_b ? k : t.columns, ldc},
              c, a_wide, b_wide, add, p.isa);
    add = true;
  }
  if (!narrow) return;
  for (int64_t i = 0; i < t.rows; ++i) {
    tiles.narrow(p.c.at(t.row + i, t.column), c + i * ldc, p.c.dtype, t.columns);
  }
}

void tile_bf16(const Product& p, const Tile& t, const float* bias) {
  const Bf16* a = p.transpose_a ? p.a.at<Bf16>(0, t.row) : p.a.at<Bf16>(t.row, 0);
  const Bf16* b = p.transpose_b ? p.b.at<Bf16>(t.column, 0) : p.b.at<Bf16>(0, t.column);
  gemm_bf16({t.rows, t.columns, p.k, p.transpose_a, p.transpose_b, p.a.ld, p.b.ld, p.c.ld},
            p.c.at(t.row, t.column), p.c.dtype, a, b, bias, p.accumulate, p.isa);
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
                     stream.isa()};
  if (p.m == 0 || p.n == 0) return;
  const Tiles& tiles = tiles_of(stream.isa());
  const TileSize size = tile_size(p.m, p.n);
  const int64_t down = (p.m + size.rows - 1) / size.rows;
  const int64_t across = (p.n + size.columns - 1) / size.columns;
  const bool bf16 = a.dtype() == Dtype::bf16 && p.k > 0 && has_gemm_bf16(stream.isa());

  // Scratch of a thread: the bias in fp32, then the tile of c, then the widened operands.
  int64_t scratch = bias.present() ? size.columns : 0;
  if (!bf16 && a.dtype() != Dtype::fp32) {
    scratch += size.rows * size.columns + (size.rows + size.columns) * std::min(kWidened, p.k);
  }
  stream.pool().run(down * across, [&](int64_t task, int thread) {
    Tile t = {task % down * size.rows, task / down * size.columns, size.rows, size.columns};
    t.rows = std::min(t.rows, p.m - t.row);
    t.columns = std::min(t.columns, p.n - t.column);
    float* memory = nullptr;
    if (scratch > 0) {
      memory = static_cast<float*>(
          stream.pool().scratch(thread, static_cast<size_t>(scratch) * sizeof(float)));
    }
    float* bias_fp32 = nullptr;
    if (p.bias.present()) {
      bias_fp32 = memory;
      memory += size.columns;
      const char* from = static_cast<const char*>(p.bias.data());
      tiles.widen(bias_fp32, from + t.column * static_cast<int64_t>(size_of(p.bias.dtype())),
                  p.bias.dtype(), t.columns);
    }
    if (bf16) {
      tile_bf16(p, t, bias_fp32);
    } else {
      tile_fp32(p, t, bias_fp32, memory, tiles);
    }
  });
}

}  // namespace shardrun::cpu
