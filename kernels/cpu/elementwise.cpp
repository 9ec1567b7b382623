// Elementwise kernels. An output may be the memory of an input: the loops read element i before
// they write it, which is what `ivdep` tells the compiler.
#include "kernels/cpu/block.h"
#include "kernels/math/functions.h"
#include "kernels/math/gelu.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

template <typename F>
HD void map1(Out out, In a, int64_t n, ThreadPool& pool, F f) {
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer_a, buffer_out;
    const float* x = read(a, begin, m, buffer_a.x);
    float* y = place(out, begin, buffer_out.x);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) y[i] = f(x[i]);
    write(out, begin, y, m);
  });
}

template <typename F>
HD void map2(Out out, In a, In b, int64_t n, ThreadPool& pool, F f) {
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer_a, buffer_b, buffer_out;
    const float* x = read(a, begin, m, buffer_a.x);
    const float* y = read(b, begin, m, buffer_b.x);
    float* z = place(out, begin, buffer_out.x);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) z[i] = f(x[i], y[i]);
    write(out, begin, z, m);
  });
}

void fill(Out out, float value, int64_t n, ThreadPool& pool) {
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer;
    float* y = place(out, begin, buffer.x);
    for (int64_t i = 0; i < m; ++i) y[i] = value;
    write(out, begin, y, m);
  });
}

void copy_bytes(void* out, const void* in, int64_t bytes, ThreadPool& pool) {
  constexpr int64_t kTaskBytes = 4 * kTaskElements;
  for_tasks(pool, quotient_up(bytes, kTaskBytes), [&](int64_t task, int) {
    const int64_t begin = task * kTaskBytes;
    __builtin_memmove(static_cast<char*>(out) + begin, static_cast<const char*>(in) + begin,
                      static_cast<size_t>(smaller(kTaskBytes, bytes - begin)));
  });
}

void cast(Out out, In in, int64_t n, ThreadPool& pool) {
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer;
    write(out, begin, read(in, begin, m, place(out, begin, buffer.x)), m);
  });
}

void add(Out out, In a, In b, int64_t n, ThreadPool& pool) {
  map2(out, a, b, n, pool, [](float x, float y) { return x + y; });
}

void gelu_forward(Out out, In x, int64_t n, ThreadPool& pool) {
  map1(out, x, n, pool, [](float v) { return math::gelu(v); });
}

void gelu_backward(Out dx, In dy, In x, int64_t n, ThreadPool& pool) {
  map2(dx, dy, x, n, pool, [](float g, float v) { return g * math::gelu_derivative(v); });
}

void dropout(Out out, In in, float p, RandomKey key, int64_t n, ThreadPool& pool) {
  const uint32_t threshold = static_cast<uint32_t>(static_cast<double>(p) * 0x1p32);
  const float scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer_in, buffer_out;
    DrawBuffer words;
    const float* x = read(in, begin, m, buffer_in.x);
    const uint32_t* draw = draws(key, begin, m, words.word);
    float* y = place(out, begin, buffer_out.x);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) {
      const float kept = x[i] * scale;  // outside the choice: no load depends on it
      y[i] = draw[i] >= threshold ? kept : 0.0f;
    }
    write(out, begin, y, m);
  });
}

void random_normal(Out out, float mean, float std, RandomKey key, int64_t first, int64_t n,
                   ThreadPool& pool) {
  for_blocks(pool, n, [&](int64_t begin, int64_t m) {
    Buffer buffer;
    DrawBuffer words;
    const uint32_t* draw = draws(key, first + begin, m, words.word);
    float* y = place(out, begin, buffer.x);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) y[i] = mean + std * math::normal_from_draw(draw[i]);
    write(out, begin, y, m);
  });
}

}  // namespace

void fill_elementwise(Table& table) {
  table.fill = fill;
  table.copy_bytes = copy_bytes;
  table.cast = cast;
  table.add = add;
  table.gelu_forward = gelu_forward;
  table.gelu_backward = gelu_backward;
  table.dropout = dropout;
  table.random_normal = random_normal;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
