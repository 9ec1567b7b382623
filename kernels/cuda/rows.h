// Sums over a row in the order that all devices share (kernels/cpu/lanes.h): element i of a chunk
// of 1024 goes to lane i mod 32, lanes are added with distances 16, 8, 4, 2, 1, chunks left to
// right. A chunk is a warp's; a row of several chunks is shared by up to eight warps of a block.
#pragma once

#include "kernels/cuda/elements.h"

namespace shardrun::cuda {

inline constexpr int kLanes = 32;
inline constexpr int kChunk = 1024;
inline constexpr int kWarps = kThreads / kLanes;
inline constexpr unsigned kWholeWarp = 0xffffffffu;

// One number of each warp of the block.
using WarpNumbers = Shared<float, kWarps>;

// Adding is commutative, so the exchange by xor gives lane 0 the sum by distances, and all others
// too.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kWholeWarp, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

// The warps that share a row. All teams of a block have one size and pass the same barriers, also
// those without a row.
struct RowTeam {
  int size;        // warps
  int first_warp;  // in the block
  int member;      // this warp's number in the team
  int lane;
  int64_t row;
  bool has_row;
};

// Warps for a row: a power of two, so that a block has whole teams.
inline int team_size(int64_t columns) {
  int size = 1;
  while (size < kWarps && int64_t{size} * kChunk < columns) size *= 2;
  return size;
}

inline Launch per_row(const char* kernel, int64_t rows, int team, StreamHandle stream) {
  const int64_t rows_per_block = kWarps / team;
  return {kernel, dim3(static_cast<unsigned>(quotient_up(rows, rows_per_block))), dim3(kThreads),
          stream};
}

__device__ __forceinline__ RowTeam row_team(int size, int64_t rows) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  RowTeam team;
  team.size = size;
  team.member = warp % size;
  team.first_warp = warp - team.member;
  team.lane = static_cast<int>(threadIdx.x) % kLanes;
  team.row = static_cast<int64_t>(blockIdx.x) * (kWarps / size) + warp / size;
  team.has_row = team.row < rows;
  return team;
}

// f(i) for the elements of the row that are this thread's, in order of i.
template <typename F>
__device__ __forceinline__ void for_own(const RowTeam& team, int64_t n, F f) {
  if (!team.has_row) return;
  for (int64_t chunk = int64_t{kChunk} * team.member; chunk < n;
       chunk += int64_t{kChunk} * team.size) {
    const int64_t end = chunk + kChunk < n ? chunk + kChunk : n;
    for (int64_t i = chunk + team.lane; i < end; i += kLanes) f(i);
  }
}

// Sum over i of f(i), the same in all threads of the team. Every thread of the block calls it.
template <typename F>
__device__ __forceinline__ float row_sum(WarpNumbers& numbers, const RowTeam& team, int64_t n,
                                         F f) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  float total = 0;
  for (int64_t first = 0; first < chunks; first += team.size) {
    const int64_t chunk = first + team.member;
    float sum = 0;
    if (team.has_row && chunk < chunks) {
      const int64_t end = (chunk + 1) * kChunk < n ? (chunk + 1) * kChunk : n;
      for (int64_t i = chunk * kChunk + team.lane; i < end; i += kLanes) sum += f(i);
    }
    sum = warp_sum(sum);
    if (team.size == 1) {
      total += sum;
      continue;
    }
    if (team.lane == 0) numbers[team.first_warp + team.member] = sum;
    __syncthreads();
    for (int k = 0; k < team.size && first + k < chunks; ++k) {
      total += numbers[team.first_warp + k];
    }
    __syncthreads();  // before the numbers are written again
  }
  return total;
}

// The largest f(i), in all threads of the team; a NaN is not seen. Every thread of the block calls
// it.
template <typename F>
__device__ __forceinline__ float row_max(WarpNumbers& numbers, const RowTeam& team, int64_t n,
                                         F f) {
  float result = math::float_of(0xff800000u);
  for_own(team, n, [&](int64_t i) {
    const float x = f(i);
    result = x > result ? x : result;
  });
  result = warp_max(result);
  if (team.size == 1) return result;
  if (team.lane == 0) numbers[team.first_warp + team.member] = result;
  __syncthreads();
  for (int k = 0; k < team.size; ++k) {
    const float x = numbers[team.first_warp + k];
    result = x > result ? x : result;
  }
  __syncthreads();  // before the numbers are written again
  return result;
}

}  // namespace shardrun::cuda
