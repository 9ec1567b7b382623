// Initial values of parameters.
#pragma once

#include "runtime/unit.h"

namespace shardrun::kernels {

// out (fp32 [n]) = elements [begin, begin + n) of the parameter in model space: normal(init_mean,
// init_std), or init_mean when init_std is 0. A function of (seed, name, element) alone.
void initialize_range(Tensor out, const ParameterSpec& spec, int64_t begin, uint64_t seed,
                      Stream& stream);

}  // namespace shardrun::kernels
