// The subcommands. Those with a RankContext run on every rank; the others on one process. Each returns
// an exit code or throws an Error.
#pragma once

#include <string>
#include <vector>

#include "launch/ranks.h"

namespace shardrun {

int run_train(const Config& config, RankContext& ranks);
int run_smoke(const Config& config, RankContext& ranks);
int run_doctor(const Config& config, RankContext& ranks);
int run_generate(const Config& config, RankContext& ranks);
int run_plan(const std::vector<std::string>& words);
int run_checkpoint(const std::vector<std::string>& words);
int run_report(const std::vector<std::string>& words);
int run_slurm_script(const std::vector<std::string>& words);

}  // namespace shardrun
