// Places in order of their tokens: a stable sort, so that equal tokens keep their order. Radix sort
// of eight bits at a time; work grows with the number of places, nothing depends on timing. Called by
// the backward pass of embeddings.
#pragma once

#include "kernels/cuda/kernels.h"

namespace shardrun::cuda {

struct SortedPlaces {
  const int32_t* tokens;  // ascending
  const int32_t* places;  // where they were
};

// tokens[count] are >= 0 and < vocabulary; count below 2^31. The result lies in the workspace.
size_t sort_places_workspace(int64_t count);
SortedPlaces sort_places(const int32_t* tokens, int64_t count, int64_t vocabulary, void* workspace,
                         StreamHandle stream);

}  // namespace shardrun::cuda
