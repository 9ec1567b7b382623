// Fixes offsets for blocks whose lifetimes are known (offline storage allocation).
#pragma once

#include "runtime/memory.h"

namespace shardrun {

// Sets every block's offset so that no two blocks alive at one time overlap, and program.peak_bytes and
// arena_bytes. Several greedy orders are tried, the smallest arena wins.
void assign_offsets(MemoryPlan::Program& program);

// Blocks that never die: one after another. Returns the bytes they need.
size_t assign_persistent_offsets(std::vector<MemoryPlan::Block>& blocks);

}  // namespace shardrun
