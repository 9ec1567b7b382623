// Proves that the smoke run finds a fault: doubles one gradient on rank 1, of one unit in one leaf
// and step, and wants every row to fail and to name them, and the exit code that goes with it.
// Started like shardrun: by mpirun, or with --comm thread:N.
#include <cstdio>

#include "launch/smoke/smoke.h"

namespace shardrun {
namespace {

constexpr int64_t kStep = 3, kLeaf = 1;  // leaf 1 is rank 1's wherever there are two ranks or more
constexpr const char* kUnit = "h.0";

void double_gradient(int rank, int64_t step, int64_t leaf, const Unit& unit, Tensor gradient) {
  if (rank != 1 || step != kStep || leaf != kLeaf || unit.path() != kUnit) return;
  for (int64_t i = 0; i < gradient.numel(); ++i) gradient.as<float>()[i] *= 2;
}

int check(const Config& config, RankContext& ranks) {
  const std::vector<SmokeRow> rows = smoke(config, ranks, double_gradient);
  if (print_smoke(rows, ranks) != static_cast<int>(ExitCode::internal)) {
    throw InternalError("smoke passed with a wrong gradient, wanted exit code 70");
  }
  for (const SmokeRow& row : rows) {
    const std::string wanted =
        fmt::format("rank 1: gradient of {} in leaf {}, step {} ", kUnit, kLeaf, kStep);
    if (!row.error.starts_with(wanted)) {
      throw InternalError("{}, zero {}: got '{}', wanted '{}...'", row.precision, row.zero,
                          row.error, wanted);
    }
  }
  return 0;
}

}  // namespace
}  // namespace shardrun

int main(int argc, char** argv) {
  using namespace shardrun;
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    const Config config = parse_config(words);
    return run_on_ranks(config, std::nullopt, &argc, &argv,
                        [&](RankContext& ranks) { return check(config, ranks); });
  } catch (const Error& error) {
    std::fprintf(stderr, "smoke_fault: %s\n", error.what());
    return static_cast<int>(error.code());
  }
}
