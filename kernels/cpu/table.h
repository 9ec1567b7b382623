// The CPU kernels of one instruction set as a table of functions. The public functions in
// kernels/*.cpp check shapes, then call through the table that the stream's instruction set names.
// Sources in this folder include nothing with inline functions that the linker could share between
// instruction sets ([Note: one header, several instruction sets]).
#pragma once

#include <cstdint>

#include "kernels/arrays.h"
#include "runtime/random.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"

namespace shardrun::cpu {

using kernels::AdamwArguments;
using kernels::In;
using kernels::LayerNormGradients;
using kernels::Out;

struct Table {
  void (*fill)(Out out, float value, int64_t n, ThreadPool& pool);
  void (*copy_bytes)(void* out, const void* in, int64_t bytes, ThreadPool& pool);
  void (*cast)(Out out, In in, int64_t n, ThreadPool& pool);
  void (*add)(Out out, In a, In b, int64_t n, ThreadPool& pool);
  void (*gelu_forward)(Out out, In x, int64_t n, ThreadPool& pool);
  void (*gelu_backward)(Out dx, In dy, In x, int64_t n, ThreadPool& pool);
  void (*dropout)(Out out, In x, float p, RandomKey key, int64_t n, ThreadPool& pool);
  void (*random_normal)(Out out, float mean, float std, RandomKey key, int64_t first, int64_t n,
                        ThreadPool& pool);

  void (*layer_norm_forward)(Out y, float* mean, float* rstd, In x, In weight, In bias, float eps,
                             int64_t rows, int64_t columns, ThreadPool& pool);
  void (*layer_norm_backward)(const LayerNormGradients& gradients, In dy, In x, In weight,
                              const float* mean, const float* rstd, int64_t rows, int64_t columns,
                              ThreadPool& pool);
  void (*column_sum)(float* out, In in, bool accumulate, int64_t rows, int64_t columns,
                     ThreadPool& pool);

  void (*embedding_forward)(Out y, const int32_t* tokens, In table, In positions, int64_t batch,
                            int64_t time, int64_t columns, ThreadPool& pool);
  void (*embedding_backward)(float* dtable, const int32_t* tokens, In dy, bool accumulate,
                             int64_t vocabulary, int64_t places, int64_t columns, ThreadPool& pool);
  void (*position_backward)(float* dpositions, In dy, bool accumulate, int64_t positions,
                            int64_t batch, int64_t time, int64_t columns, ThreadPool& pool);

  void (*cross_entropy_forward)(float* loss_sum, int64_t* valid, float* lse, In logits,
                                const int32_t* targets, int64_t vocabulary, int64_t rows,
                                int64_t columns, ThreadPool& pool);
  void (*cross_entropy_backward)(Out dlogits, In logits, const float* lse, const int32_t* targets,
                                 int64_t vocabulary, float scale, int64_t rows, int64_t columns,
                                 ThreadPool& pool);

  void (*fold)(float* accumulator, In leaf, bool add, int64_t n, int64_t* found, int64_t tag,
               ThreadPool& pool);
  void (*block_squares)(double* squares, const float* gradient, int64_t blocks, ThreadPool& pool);

  void (*adamw)(const AdamwArguments& arguments, int64_t n, ThreadPool& pool);
};

namespace base {
const Table& table();
}
namespace avx2 {
const Table& table();
}
namespace avx512 {
const Table& table();
}

// The 16-bit matrix extensions past AVX-512 serve matrix products only.
inline const Table& table_for(const Stream& stream) {
  switch (stream.isa()) {
    case Isa::baseline:
      return base::table();
    case Isa::avx2:
      return avx2::table();
    default:
      return avx512::table();
  }
}

}  // namespace shardrun::cpu
