// The CUDA kernels, as functions that launch them on a stream and return at once. They take what
// the CPU table takes (kernels/cpu/table.h) and give the same bits; shapes were checked by the
// public functions. Pointers are device memory, with no alignment wanted beyond an element's.
// Temporary memory is the caller's: a function that needs it has a twin that says how many bytes.
// Launches that fail throw DeviceError. No toolkit header is needed here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/adamw_scalars.h"
#include "kernels/arrays.h"
#include "runtime/random.h"

struct CUstream_st;

namespace shardrun::cuda {

using StreamHandle = CUstream_st*;  // cudaStream_t

using kernels::AdamwArguments;
using kernels::In;
using kernels::LayerNormGradients;
using kernels::Out;

void fill(Out out, float value, int64_t n, StreamHandle stream);
void copy_bytes(void* out, const void* in, int64_t bytes, StreamHandle stream);
void cast(Out out, In in, int64_t n, StreamHandle stream);
void add(Out out, In a, In b, int64_t n, StreamHandle stream);
void gelu_forward(Out out, In x, int64_t n, StreamHandle stream);
void gelu_backward(Out dx, In dy, In x, int64_t n, StreamHandle stream);
void dropout(Out out, In x, float p, RandomKey key, int64_t n, StreamHandle stream);
void random_normal(Out out, float mean, float std, RandomKey key, int64_t first, int64_t n,
                   StreamHandle stream);

void layer_norm_forward(Out y, float* mean, float* rstd, In x, In weight, In bias, float eps,
                        int64_t rows, int64_t columns, StreamHandle stream);

size_t layer_norm_backward_workspace(int64_t rows, int64_t columns);
void layer_norm_backward(const LayerNormGradients& gradients, In dy, In x, In weight,
                         const float* mean, const float* rstd, int64_t rows, int64_t columns,
                         void* workspace, StreamHandle stream);

size_t column_sum_workspace(int64_t rows, int64_t columns);
void column_sum(float* out, In in, bool accumulate, int64_t rows, int64_t columns, void* workspace,
                StreamHandle stream);

void embedding_forward(Out y, const int32_t* tokens, In table, In positions, int64_t batch,
                       int64_t time, int64_t columns, StreamHandle stream);
size_t embedding_backward_workspace(int64_t places);
void embedding_backward(float* dtable, const int32_t* tokens, In dy, bool accumulate,
                        int64_t vocabulary, int64_t places, int64_t columns, void* workspace,
                        StreamHandle stream);
void position_backward(float* dpositions, In dy, bool accumulate, int64_t positions, int64_t batch,
                       int64_t time, int64_t columns, StreamHandle stream);

void cross_entropy_forward(float* loss_sum, int64_t* valid, float* lse, In logits,
                           const int32_t* targets, int64_t vocabulary, int64_t rows,
                           int64_t columns, StreamHandle stream);
void cross_entropy_backward(Out dlogits, In logits, const float* lse, const int32_t* targets,
                            int64_t vocabulary, float scale, int64_t rows, int64_t columns,
                            StreamHandle stream);

void fold(float* accumulator, In leaf, bool add, int64_t n, int64_t* found, int64_t tag,
          StreamHandle stream);
void block_squares(double* squares, const float* gradient, int64_t blocks, StreamHandle stream);
void add_exact(int64_t* limbs, const double* values, int64_t n, StreamHandle stream);

void adamw(const AdamwArguments& arguments, StreamHandle stream);

}  // namespace shardrun::cuda
