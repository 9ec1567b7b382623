// The kernels that runtime's ValuePool adds gradients with.
#pragma once

#include "runtime/value.h"

namespace shardrun {

GradientMath gradient_math();

}  // namespace shardrun
