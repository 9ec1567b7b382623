// `shardrun bench WHAT`: the project's own measurements, as ratios to what the machine does plainly in
// the same run. Called by main.cpp on every rank.
#pragma once

#include <span>
#include <string>

#include "launch/ranks.h"

namespace shardrun {

// One line of a result: a ratio with its target, or a measurement beside its bound.
struct BenchRow {
  std::string name;  // "save"
  std::string unit;  // "MB/s"
  double measured = 0;
  double reference = 0;  // what it is held against; 0: nothing
  std::string against;   // "plain write"
  double target = 0;     // of measured / reference; 0: none
  bool at_most = false;  // the target is a ceiling
};

// A table, or JSON; on the first rank. Returns false where a target is missed.
bool print_rows(const std::string& title, std::span<const BenchRow> rows, bool json);

struct Bench {
  const char* name;
  const char* does;
  int (*run)(const Config& config, RankContext& ranks);  // null: not built yet
};
std::span<const Bench> benches();
// UsageError names those that there are.
const Bench& find_bench(const std::string& name);

int bench_checkpoint(const Config& config, RankContext& ranks);
int bench_gemm(const Config& config, RankContext& ranks);
int bench_kernels(const Config& config, RankContext& ranks);
int bench_step(const Config& config, RankContext& ranks);

}  // namespace shardrun
