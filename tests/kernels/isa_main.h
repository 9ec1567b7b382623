// For tests of code that uses oneDNN, which takes one instruction set per process: the level is the
// first argument of the executable, and every level is a ctest of its own.
#pragma once

#include "runtime/stream.h"

namespace shardrun {

Isa test_isa();

}  // namespace shardrun
