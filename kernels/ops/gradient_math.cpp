#include "kernels/ops/gradient_math.h"

#include "kernels/elementwise.h"

namespace shardrun {

GradientMath gradient_math() { return {.add = kernels::add, .cast = kernels::cast}; }

}  // namespace shardrun
