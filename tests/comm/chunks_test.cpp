// Messages beyond 2^31 bytes are cut without a gap.
#include "comm/chunks.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace shardrun {

namespace {

using Pieces = std::vector<std::pair<size_t, size_t>>;

Pieces pieces_of(size_t total, size_t limit) {
  Pieces pieces;
  for_each_chunk(total, limit,
                 [&](size_t offset, size_t count) { pieces.emplace_back(offset, count); });
  return pieces;
}

TEST(Chunks, CoverTheMessageInOrder) {
  EXPECT_EQ(pieces_of(0, 4), Pieces{});
  EXPECT_EQ(pieces_of(4, 4), (Pieces{{0, 4}}));
  EXPECT_EQ(pieces_of(9, 4), (Pieces{{0, 4}, {4, 4}, {8, 1}}));
  const size_t gib = size_t{1} << 30;
  EXPECT_EQ(pieces_of(2 * gib + 5, gib), (Pieces{{0, gib}, {gib, gib}, {2 * gib, 5}}));
}

TEST(Chunks, StagingIsAlignedAndLeavesThisRankOut) {
  EXPECT_EQ(Staging(1, 100).bytes(), 0u);
  EXPECT_EQ(Staging(4, 0).bytes(), 0u);
  EXPECT_EQ(Staging(4, 1).bytes(), 3 * Memory::kAlignment);
  EXPECT_EQ(Staging(4, Memory::kAlignment).bytes(), 3 * Memory::kAlignment);
}

}  // namespace

}  // namespace shardrun
