// A pass of the sort: each warp counts the digits of its own stretch of places; the counts become
// where each digit of each stretch begins; then the places go there in order. Lanes with equal digits
// find one another by votes, so nothing is counted by atomics.
#include "kernels/cuda/sort.h"

#include "kernels/cuda/rows.h"

namespace shardrun::cuda {

namespace {

constexpr int kDigits = 256;
constexpr int kDigitBits = 8;
constexpr int kStretch = 256;             // places of a warp
constexpr int kTile = kWarps * kStretch;  // of a block
static_assert(kDigits == kThreads);       // a thread per digit where digits are added up

using Counts = Shared<uint32_t, kWarps * kDigits>;  // of each warp

struct Stretch {
  int warp, lane;
  int64_t first;
};

__device__ __forceinline__ Stretch stretch_of() {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  return {warp, static_cast<int>(threadIdx.x) % kLanes,
          static_cast<int64_t>(blockIdx.x) * kTile + warp * kStretch};
}

// Which lanes have this lane's digit; 0 where there is no item.
__device__ __forceinline__ unsigned peers_of(int digit, bool there) {
  unsigned peers = __ballot_sync(kWholeWarp, there);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const bool own = (digit >> bit & 1) != 0;
    const unsigned with = __ballot_sync(kWholeWarp, own);
    peers &= own ? with : ~with;
  }
  return there ? peers : 0;
}

// Calls use(i, token, at) for the items of the stretch in order; `at` is what counts had for the
// digit plus the number of equal digits before, and counts grow.
template <typename Use>
__device__ __forceinline__ void count_stretch(Counts& counts, const Stretch& s,
                                              const int32_t* tokens, int64_t count, int shift,
                                              Use use) {
  for (int64_t begin = s.first; begin < s.first + kStretch && begin < count; begin += kLanes) {
    const int64_t i = begin + s.lane;
    const bool there = i < count;
    const int32_t token = there ? tokens[i] : 0;
    const int digit = token >> shift & (kDigits - 1);
    const unsigned peers = peers_of(digit, there);
    const int slot = s.warp * kDigits + digit;
    const uint32_t before = there ? counts[slot] : 0;
    __syncwarp();  // all have read
    const unsigned earlier = peers & ((1u << s.lane) - 1);
    if (there && earlier == 0) counts[slot] = before + static_cast<uint32_t>(__popc(peers));
    __syncwarp();  // before the next read
    if (there) use(i, token, before + static_cast<uint32_t>(__popc(earlier)));
  }
}

__device__ __forceinline__ void clear_counts(Counts& counts) {
  for (int w = 0; w < kWarps; ++w) counts[w * kDigits + static_cast<int>(threadIdx.x)] = 0;
}

// totals[digit, tile]
__global__ void __launch_bounds__(kThreads)
    count_digits_kernel(uint32_t* totals, const int32_t* tokens, int64_t count, int shift) {
  __shared__ Counts counts;
  clear_counts(counts);
  __syncthreads();
  count_stretch(counts, stretch_of(), tokens, count, shift, [](int64_t, int32_t, uint32_t) {});
  __syncthreads();
  const int digit = static_cast<int>(threadIdx.x);
  uint32_t total = 0;
  for (int w = 0; w < kWarps; ++w) total += counts[w * kDigits + digit];
  totals[static_cast<int64_t>(digit) * gridDim.x + blockIdx.x] = total;
}

// One block: totals become sums of all that come before. A thread per digit.
__global__ void __launch_bounds__(kThreads) begin_digits_kernel(uint32_t* totals, int64_t tiles) {
  __shared__ Shared<uint32_t, kDigits> sums;
  const int digit = static_cast<int>(threadIdx.x);
  uint32_t* own = totals + digit * tiles;
  uint32_t sum = 0;
  for (int64_t t = 0; t < tiles; ++t) sum += own[t];
  sums[digit] = sum;
  __syncthreads();
  uint32_t begin = 0;
  for (int d = 0; d < digit; ++d) begin += sums[d];
  for (int64_t t = 0; t < tiles; ++t) {
    const uint32_t here = own[t];
    own[t] = begin;
    begin += here;
  }
}

// Without `places` an item's place is its index.
__global__ void __launch_bounds__(kThreads)
    move_items_kernel(int32_t* tokens_out, int32_t* places_out, const int32_t* tokens,
                      const int32_t* places, const uint32_t* begins, int64_t count, int shift) {
  __shared__ Counts counts;
  const Stretch stretch = stretch_of();
  clear_counts(counts);
  __syncthreads();
  count_stretch(counts, stretch, tokens, count, shift, [](int64_t, int32_t, uint32_t) {});
  __syncthreads();
  const int digit = static_cast<int>(threadIdx.x);
  uint32_t begin = begins[static_cast<int64_t>(digit) * gridDim.x + blockIdx.x];
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t here = counts[w * kDigits + digit];
    counts[w * kDigits + digit] = begin;
    begin += here;
  }
  __syncthreads();
  count_stretch(counts, stretch, tokens, count, shift, [=](int64_t i, int32_t token, uint32_t at) {
    tokens_out[at] = token;
    places_out[at] = places ? places[i] : static_cast<int32_t>(i);
  });
}

int64_t tiles_of(int64_t count) {
  return quotient_up(count, kTile);
}

}  // namespace

size_t sort_places_workspace(int64_t count) {
  return static_cast<size_t>(4 * count + kDigits * tiles_of(count)) * sizeof(int32_t);
}

SortedPlaces sort_places(const int32_t* tokens, int64_t count, int64_t vocabulary, void* workspace,
                         StreamHandle stream) {
  int32_t* const memory = static_cast<int32_t*>(workspace);
  uint32_t* const totals = reinterpret_cast<uint32_t*>(memory + 4 * count);
  const int64_t tiles = tiles_of(count);
  const dim3 grid(static_cast<unsigned>(tiles));
  const int32_t* places = nullptr;
  int side = 0;
  // Also with a vocabulary of one token there is one pass, which writes the places.
  for (int shift = 0; shift == 0 || (vocabulary - 1) >> shift > 0; shift += kDigitBits) {
    int32_t *tokens_out = memory + 2 * side * count, *places_out = tokens_out + count;
    launch({"count_digits", grid, dim3(kThreads), stream}, count_digits_kernel, totals, tokens,
           count, shift);
    launch({"begin_digits", dim3(1), dim3(kThreads), stream}, begin_digits_kernel, totals, tiles);
    launch({"move_items", grid, dim3(kThreads), stream}, move_items_kernel, tokens_out, places_out,
           tokens, places, totals, count, shift);
    tokens = tokens_out;
    places = places_out;
    side = 1 - side;
  }
  return {tokens, places};
}

}  // namespace shardrun::cuda
