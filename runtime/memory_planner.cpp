#include "runtime/memory_planner.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace shardrun {
namespace {

using Block = MemoryPlan::Block;

size_t peak_of(const std::vector<Block>& blocks) {
  std::vector<std::pair<int64_t, int64_t>> events;  // at one event number frees come before births
  for (const Block& block : blocks) {
    events.emplace_back(2 * block.birth + 1, static_cast<int64_t>(block.bytes));
    events.emplace_back(2 * block.death, -static_cast<int64_t>(block.bytes));
  }
  std::sort(events.begin(), events.end());
  int64_t alive = 0, peak = 0;
  for (const auto& [when, bytes] : events) peak = std::max(peak, alive += bytes);
  return static_cast<size_t>(peak);
}

// Places blocks in the given order, each at the lowest offset (or in the tightest gap) that no block
// already placed and alive at the same time covers. Returns the arena's size.
size_t place(std::vector<Block>& blocks, const std::vector<size_t>& order, bool best_fit) {
  std::vector<size_t> placed;  // by offset
  size_t arena = 0;
  for (size_t i : order) {
    Block& block = blocks[i];
    size_t offset = 0, best = 0, best_gap = std::numeric_limits<size_t>::max();
    for (size_t j : placed) {
      const Block& other = blocks[j];
      if (other.death <= block.birth || block.death <= other.birth) continue;
      if (other.offset >= offset + block.bytes) {
        const size_t gap = other.offset - offset - block.bytes;
        if (gap < best_gap) {
          best = offset;
          best_gap = gap;
          if (!best_fit) break;
        }
      }
      offset = std::max(offset, other.offset + other.bytes);
    }
    block.offset = best_gap != std::numeric_limits<size_t>::max() ? best : offset;
    const auto at = std::lower_bound(
        placed.begin(), placed.end(), block.offset,
        [&](size_t j, size_t value) { return blocks[j].offset < value; });
    placed.insert(at, i);
    arena = std::max(arena, block.offset + block.bytes);
  }
  return arena;
}

}  // namespace

void assign_offsets(MemoryPlan::Program& program) {
  std::vector<Block>& blocks = program.blocks;
  program.peak_bytes = peak_of(blocks);
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);

  auto life = [](const Block& b) { return b.death - b.birth; };
  using Before = bool (*)(const Block&, const Block&, int64_t (*)(const Block&));
  const Before orders[] = {
      [](const Block& a, const Block& b, auto) { return a.bytes > b.bytes; },
      [](const Block& a, const Block& b, auto life) {
        return life(a) != life(b) ? life(a) > life(b) : a.bytes > b.bytes;
      },
      [](const Block& a, const Block& b, auto life) {
        return static_cast<double>(a.bytes) * static_cast<double>(life(a)) >
               static_cast<double>(b.bytes) * static_cast<double>(life(b));
      },
      [](const Block& a, const Block& b, auto) { return a.birth < b.birth; },
  };
  program.arena_bytes = std::numeric_limits<size_t>::max();
  std::vector<Block> best;
  for (const Before& before : orders) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return before(blocks[a], blocks[b], life);
    });
    for (bool best_fit : {false, true}) {
      const size_t arena = place(blocks, order, best_fit);
      if (arena < program.arena_bytes) {
        program.arena_bytes = arena;
        best = blocks;
      }
      if (arena == program.peak_bytes) break;
    }
    if (program.arena_bytes == program.peak_bytes) break;
  }
  if (!best.empty()) blocks = std::move(best);
  if (blocks.empty()) program.arena_bytes = 0;
}

size_t assign_persistent_offsets(std::vector<Block>& blocks) {
  size_t offset = 0;
  for (Block& block : blocks) {
    block.offset = offset;
    offset += block.bytes;
  }
  return offset;
}

}  // namespace shardrun
