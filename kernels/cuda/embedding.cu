// Embedding: rows gathered forward, summed backward in order of place and without atomics.
#include "kernels/cuda/rows.h"

namespace shardrun::cuda {

namespace {

// Places that a block looks at between two barriers, a bit each.
constexpr int kWindow = kThreads;

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

// One block per place. That of a token's first place adds up all of the token's places in order;
// the others leave.
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(float* dtable, const int32_t* tokens, In dy, int64_t places,
                              int64_t columns) {
  __shared__ Shared<uint32_t, kWarps> matches;
  const int64_t own = blockIdx.x;
  const int32_t token = tokens[own];
  bool seen = false;
  for (int64_t i = threadIdx.x; i < own && !seen; i += kThreads) seen = tokens[i] == token;
  if (__syncthreads_or(seen)) return;

  float* sum = dtable + token * columns;
  for (int64_t first = own; first < places; first += kWindow) {
    const int64_t mine = first + threadIdx.x;
    const uint32_t word = __ballot_sync(kWholeWarp, mine < places && tokens[mine] == token);
    if (threadIdx.x % kLanes == 0) matches[static_cast<int>(threadIdx.x) / kLanes] = word;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      for (uint32_t rest = matches[w]; rest != 0; rest &= rest - 1) {
        const int64_t place = first + w * kLanes + (__ffs(static_cast<int>(rest)) - 1);
        for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
          sum[c] += load(dy, place * columns + c);
        }
      }
    }
    __syncthreads();  // before the matches are written again
  }
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

void embedding_backward(float* dtable, const int32_t* tokens, In dy, bool accumulate,
                        int64_t vocabulary, int64_t places, int64_t columns, StreamHandle stream) {
  if (!accumulate) fill({dtable, Dtype::fp32}, 0, vocabulary * columns, stream);
  if (places * columns == 0) return;
  launch({"embedding_backward", dim3(static_cast<unsigned>(places)), dim3(kThreads), stream},
         embedding_backward_kernel, dtable, tokens, dy, places, columns);
}

void position_backward(float* dpositions, In dy, bool accumulate, int64_t positions, int64_t batch,
                       int64_t time, int64_t columns, StreamHandle stream) {
  if (positions * columns == 0) return;
  launch(per_thread("position_backward", positions * columns, stream), position_backward_kernel,
         dpositions, dy, accumulate, positions, batch, time, columns);
}

}  // namespace shardrun::cuda
