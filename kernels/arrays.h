// Tensors as the kernels of a device take them: pointers whose shapes the public functions have
// checked. No functions here: CPU sources of several instruction sets include it.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"

namespace shardrun::kernels {

struct AdamwScalars;
struct AdamwRange;

// Floating tensors without a shape: fp32, bf16 or fp16; data is null when the tensor is absent.
struct In {
  const void* data;
  Dtype dtype;
};
struct Out {
  void* data;
  Dtype dtype;
};

struct LayerNormGradients {
  Out dx;
  float* dweight;
  float* dbias;  // may be null
  bool accumulate_weight, accumulate_bias;
};

struct AdamwArguments {
  float* master;  // null: compute is the parameter
  Out compute;
  float* moment1;
  float* moment2;
  const float* gradient;
  const AdamwScalars* scalars;  // on the host, read before the call returns
  const AdamwRange* ranges;     // likewise
  int64_t range_count;
};

}  // namespace shardrun::kernels
