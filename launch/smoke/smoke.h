// The smoke run: a tiny GPT, no data, no files. For each precision one rank alone is the reference; then
// all ranks train together at every stage and must reach the same bits, with the loss falling.
#pragma once

#include <string>
#include <vector>

#include "launch/ranks.h"
#include "sharding/train_step.h"

namespace shardrun {

struct SmokeRow {
  std::string precision;
  int zero = 0;
  double first_loss = 0, last_loss = 0;
  std::string hash;   // XXH3-128 of parameters and moments in model space
  std::string error;  // empty: passed; else what differs and where
};

// Changes a leaf's gradient before it is reduced: tests prove with it that a fault is found.
using SmokeFault = void (*)(int rank, int64_t step, int64_t leaf, const Unit& unit, Tensor gradient);

// All ranks call; the same rows on every rank.
std::vector<SmokeRow> smoke(const Config& config, RankContext& ranks, SmokeFault fault = nullptr);

// Prints the table on the first rank; 0, or 70 when a row failed.
int print_smoke(const std::vector<SmokeRow>& rows, const RankContext& ranks);

}  // namespace shardrun
