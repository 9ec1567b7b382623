#include "launch/train/environment.h"

#include <nlohmann/json.hpp>

namespace shardrun {

const char* version() { return SHARDRUN_VERSION; }

std::string environment_json(const RankContext& ranks, const RankDevice& device,
                             const std::string& numerics_key) {
  const nlohmann::ordered_json json{
      {"shardrun", version()},
      {"compiler", __VERSION__},
      {"host", host_name()},
      {"ranks", ranks.comm.size()},
      {"transport", ranks.comm.transport()},
      {"mpi", ranks.transport_version},
      {"threads", device.threads()},
      {"numerics_key", numerics_key},
      {"memory_bytes", device.plan().arena_bytes()},
  };
  return json.dump(2) + "\n";
}

}  // namespace shardrun
