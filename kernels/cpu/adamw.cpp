// AdamW in one pass: each block of the slice is read and written once.
#include "kernels/adamw.h"

#include "kernels/cpu/block.h"
#include "kernels/math/adamw.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

using kernels::AdamwRange;

void round_stochastic(Bf16* out, const float* p, const AdamwRange& range, int64_t begin,
                      int64_t n) {
  DrawBuffer words;
  const uint32_t* draw = draws(range.key, range.model_begin + (begin - range.begin), n, words.word);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = math::narrow_stochastic(p[i], draw[i]);
}

// Elements [begin, begin + n) of one range, at most a block.
void update_block(const AdamwArguments& a, const AdamwRange& range, const math::AdamwStep& step,
                  int64_t begin, int64_t n) {
  Buffer buffer;
  float* p = a.master ? a.master + begin : buffer.x;
  if (!a.master) widen_many(p, static_cast<const Bf16*>(a.compute.data) + begin, n);
  float* m = a.moment1 + begin;
  float* v = a.moment2 + begin;
  const float* g = a.gradient + begin;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) step(p[i], m[i], v[i], g[i]);
  if (!a.master) {
    round_stochastic(static_cast<Bf16*>(a.compute.data) + begin, p, range, begin, n);
  } else if (a.compute.data) {
    write(a.compute, begin, p, n);
  }
}

void adamw(const AdamwArguments& a, int64_t n, ThreadPool& pool) {
  for_tasks(pool, quotient_up(n, kTaskElements), [&](int64_t task, int) {
    const int64_t task_begin = task * kTaskElements;
    const int64_t task_end = smaller(n, task_begin + kTaskElements);
    // The first range that ends past the start of the task.
    int64_t low = 0, high = a.range_count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (a.ranges[middle].end > task_begin) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    for (int64_t r = low; r < a.range_count && a.ranges[r].begin < task_end; ++r) {
      const AdamwRange& range = a.ranges[r];
      const math::AdamwStep step = math::adamw_step(*a.scalars, range);
      const int64_t end = smaller(range.end, task_end);
      for (int64_t i = larger(range.begin, task_begin); i < end; i += kBlock) {
        update_block(a, range, step, i, smaller(kBlock, end - i));
      }
    }
  });
}

}  // namespace

void fill_adamw(Table& table) {
  table.adamw = adamw;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
