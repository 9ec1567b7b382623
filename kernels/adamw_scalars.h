// What decides an AdamW update beside the tensors: plain values, for the kernels of all devices.
// The formula is in kernels/adamw.h.
#pragma once

#include <cstdint>

#include "runtime/random.h"

namespace shardrun::kernels {

struct AdamwScalars {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  int64_t t = 1;               // number of this update, from 1
  double gradient_factor = 1;  // leaf_nominal / (valid x loss scale) x clip; applied as float
};

// Elements [begin, end) of the slice have their own factors. Ranges are sorted, do not overlap, and
// elements in none of them (padding) keep the value zero.
struct AdamwRange {
  int64_t begin = 0, end = 0;
  float lr_factor = 1;
  float weight_decay = 0;
  RandomKey key;            // stochastic rounding: key of the parameter
  int64_t model_begin = 0;  // index in the parameter of element `begin`: the counter of the draw
};

}  // namespace shardrun::kernels
