// Embedding: rows gathered forward, summed backward in order of place and without atomics.
#include "kernels/cuda/rows.h"
#include "kernels/cuda/sort.h"

namespace shardrun::cuda {

namespace {

constexpr int kColumns = kLanes * kVector;  // of a warp

__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(Out y, const int32_t* tokens, In table, In positions, int64_t places,
                             int64_t time, int64_t columns, int64_t per_row) {
  const int64_t item = global_thread();
  const int64_t place = item / per_row;
  if (place >= places) return;
  const int64_t c = kVector * (item % per_row);
  const int count = count_from(c, columns);
  Eight row;
  load(row, table, tokens[place] * columns + c, count);
  if (positions.data) {
    Eight position;
    load(position, positions, place % time * columns + c, count);
#pragma unroll
    for (int k = 0; k < kVector; ++k) row.x[k] = row.x[k] + position.x[k];
  }
  store(y, place * columns + c, row, count);
}

// Over places in order of their tokens, a warp per place and 256 columns: that of a token's first
// place adds up all of the token's places in order, the others leave.
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(float* dtable, SortedPlaces sorted, In dy, int64_t places,
                              int64_t columns) {
  const int64_t own = global_thread() / kLanes;
  if (own >= places) return;
  const int32_t token = sorted.tokens[own];
  if (own > 0 && sorted.tokens[own - 1] == token) return;
  const int64_t c = int64_t{kColumns} * blockIdx.y + threadIdx.x % kLanes * kVector;
  const int count = count_from(c, columns);
  if (count <= 0) return;
  Eight sum;
  load(sum, {dtable, Dtype::fp32}, token * columns + c, count);
  for (int64_t i = own; i < places && sorted.tokens[i] == token; ++i) {
    Eight row;
    load(row, dy, sorted.places[i] * columns + c, count);
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum.x[k] += row.x[k];
  }
  store({dtable, Dtype::fp32}, token * columns + c, sum, count);
}

__global__ void __launch_bounds__(kThreads)
    position_backward_kernel(float* dpositions, In dy, bool accumulate, int64_t positions,
                             int64_t batch, int64_t time, int64_t columns) {
  const int64_t i = global_thread();
  if (i >= positions * columns) return;
  float sum = accumulate ? dpositions[i] : 0.0f;
  if (i < time * columns) {
    for (int64_t b = 0; b < batch; ++b) sum += load(dy, b * time * columns + i);
  } else if (accumulate) {
    return;
  }
  dpositions[i] = sum;
}

}  // namespace

void embedding_forward(Out y, const int32_t* tokens, In table, In positions, int64_t batch,
                       int64_t time, int64_t columns, StreamHandle stream) {
  const int64_t places = batch * time, per_row = quotient_up(columns, kVector);
  if (places * per_row == 0) return;
  launch(per_thread("embedding_forward", places * per_row, stream), embedding_forward_kernel, y,
         tokens, table, positions, places, time, columns, per_row);
}

size_t embedding_backward_workspace(int64_t places) {
  return sort_places_workspace(places);
}

void embedding_backward(float* dtable, const int32_t* tokens, In dy, bool accumulate,
                        int64_t vocabulary, int64_t places, int64_t columns, void* workspace,
                        StreamHandle stream) {
  if (!accumulate) fill({dtable, Dtype::fp32}, 0, vocabulary * columns, stream);
  if (places * columns == 0) return;
  const SortedPlaces sorted = sort_places(tokens, places, vocabulary, workspace, stream);
  const dim3 grid(static_cast<unsigned>(quotient_up(places * kLanes, kThreads)),
                  static_cast<unsigned>(quotient_up(columns, kColumns)));
  launch({"embedding_backward", grid, dim3(kThreads), stream}, embedding_backward_kernel, dtable,
         sorted, dy, places, columns);
}

void position_backward(float* dpositions, In dy, bool accumulate, int64_t positions, int64_t batch,
                       int64_t time, int64_t columns, StreamHandle stream) {
  if (positions * columns == 0) return;
  launch(per_thread("position_backward", positions * columns, stream), position_backward_kernel,
         dpositions, dy, accumulate, positions, batch, time, columns);
}

}  // namespace shardrun::cuda
