// Embedding: rows gathered forward, summed backward.
#include "kernels/cpu/block.h"

namespace shardrun::cpu::SHARDRUN_ISA {

namespace {

constexpr int64_t kVocabularyTasks = 16;

void embedding_forward(Out y, const int32_t* tokens, In table, In positions, int64_t batch,
                       int64_t time, int64_t columns, ThreadPool& pool) {
  for_rows(pool, batch * time, columns, [&](int64_t first, int64_t last, int) {
    Buffer buffer_table, buffer_positions, buffer_out;
    for (int64_t place_BT = first; place_BT < last; ++place_BT) {
      for (int64_t c = 0; c < columns; c += kBlock) {
        const int64_t m = smaller(kBlock, columns - c);
        const float* a = read(table, tokens[place_BT] * columns + c, m, buffer_table.x);
        if (positions.data) {
          const float* b = read(positions, place_BT % time * columns + c, m, buffer_positions.x);
          float* out = place(y, place_BT * columns + c, buffer_out.x);
#pragma GCC ivdep
          for (int64_t i = 0; i < m; ++i) out[i] = a[i] + b[i];
          a = out;
        }
        write(y, place_BT * columns + c, a, m);
      }
    }
  });
}

HD void add_row(float* sum, In in, int64_t at, int64_t columns) {
  Buffer buffer;
  for (int64_t c = 0; c < columns; c += kBlock) {
    const int64_t m = smaller(kBlock, columns - c);
    const float* x = read(in, at + c, m, buffer.x);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) sum[c + i] += x[i];
  }
}

// Each task owns the rows that are congruent to it, so that frequent tokens, which have
// neighbouring numbers, fall to different tasks; it looks at every token and adds in order of
// place.
void embedding_backward(float* dtable, const int32_t* tokens, In dy, bool accumulate,
                        int64_t vocabulary, int64_t places, int64_t columns, ThreadPool& pool) {
  for_tasks(pool, smaller(kVocabularyTasks, vocabulary), [&](int64_t task, int) {
    if (!accumulate) {
      for (int64_t v = task; v < vocabulary; v += kVocabularyTasks) {
        __builtin_memset(dtable + v * columns, 0, static_cast<size_t>(columns) * sizeof(float));
      }
    }
    for (int64_t i = 0; i < places; ++i) {
      if (tokens[i] % kVocabularyTasks != task) continue;
      add_row(dtable + tokens[i] * columns, dy, i * columns, columns);
    }
  });
}

void position_backward(float* dpositions, In dy, bool accumulate, int64_t positions, int64_t batch,
                       int64_t time, int64_t columns, ThreadPool& pool) {
  for_rows(pool, positions, columns * larger(1, batch), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      float* sum = dpositions + t * columns;
      if (!accumulate) __builtin_memset(sum, 0, static_cast<size_t>(columns) * sizeof(float));
      if (t >= time) continue;
      for (int64_t b = 0; b < batch; ++b) add_row(sum, dy, (b * time + t) * columns, columns);
    }
  });
}

}  // namespace

void fill_embedding(Table& table) {
  table.embedding_forward = embedding_forward;
  table.embedding_backward = embedding_backward;
  table.position_backward = position_backward;
}

}  // namespace shardrun::cpu::SHARDRUN_ISA
