#include "launch/bench/bench.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace shardrun {
namespace {

constexpr Bench kBenches[] = {
    {"checkpoint", "save, load and export against plain file I/O; steps while a save is written",
     bench_checkpoint},
    {"gemm", "matrix products of a leaf against a square one", bench_gemm},
    {"kernels", "all other kernels against a plain copy", bench_kernels},
    {"collectives", "collectives against plain copies", nullptr},
    {"step", "a training step, part by part, against a square matrix product", bench_step},
    {"memory", "memory of a step against its plan", nullptr},
};

}  // namespace

std::span<const Bench> benches() {
  return kBenches;
}

const Bench& find_bench(const std::string& name) {
  std::string built;
  for (const Bench& bench : kBenches) {
    if (bench.run != nullptr) built += (built.empty() ? "" : ", ") + std::string(bench.name);
  }
  for (const Bench& bench : kBenches) {
    if (name != bench.name) continue;
    if (bench.run == nullptr) throw UsageError("bench {}: not built yet; there is {}", name, built);
    return bench;
  }
  throw UsageError("bench: got '{}', wanted {}", name, built);
}

bool print_rows(const std::string& title, std::span<const BenchRow> rows, bool json) {
  bool met = true;
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (!json) std::printf("%s\n", title.c_str());
  for (const BenchRow& row : rows) {
    const double ratio = row.reference > 0 ? row.measured / row.reference : 0;
    const bool good = row.target == 0 || (row.at_most ? ratio <= row.target : ratio >= row.target);
    met = met && good;
    if (json) {
      nlohmann::ordered_json line{
          {"name", row.name}, {"unit", row.unit}, {"measured", row.measured}};
      if (row.reference > 0) {
        line["against"] = row.against;
        line["reference"] = row.reference;
        line["ratio"] = ratio;
      }
      if (row.target > 0) {
        line["target"] = row.target;
        line["met"] = good;
      }
      all.push_back(std::move(line));
      continue;
    }
    std::printf("  %-28s %10.1f %-5s", row.name.c_str(), row.measured, row.unit.c_str());
    if (row.reference > 0) {
      std::printf("  %-12s %10.1f  ratio %5.2f", row.against.c_str(), row.reference, ratio);
    }
    if (row.target > 0) {
      std::printf("  wanted %s %.2f: %s", row.at_most ? "<=" : ">=", row.target,
                  good ? "met" : "missed");
    }
    std::printf("\n");
  }
  if (json)
    std::printf("%s\n", nlohmann::ordered_json{{"bench", title}, {"rows", all}}.dump(2).c_str());
  return met;
}

}  // namespace shardrun
