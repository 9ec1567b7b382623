// What a run was made with, for env.json and for messages.
#pragma once

#include <string>

#include "launch/ranks.h"
#include "launch/train/rank_device.h"

namespace shardrun {

const char* version();  // of shardrun, "0.1.0"
std::string environment_json(const RankContext& ranks, RankDevice& device,
                             const std::string& numerics_key);

}  // namespace shardrun
