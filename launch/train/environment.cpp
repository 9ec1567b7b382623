#include "launch/train/environment.h"

#include <nlohmann/json.hpp>

#include "kernels/matmul.h"

namespace shardrun {

const char* version() { return SHARDRUN_VERSION; }

std::string environment_json(const RankContext& ranks, RankDevice& device,
                             const std::string& numerics_key) {
  nlohmann::ordered_json json{
      {"shardrun", version()},
      {"compiler", __VERSION__},
      {"host", host_name()},
      {"ranks", ranks.comm.size()},
      {"device", device.name()},
      {"transport", device.comm().transport()},
      {"mpi", ranks.transport_version},
      {"threads", device.threads()},
      {"numerics_key", numerics_key},
      {"memory_bytes", device.plan().arena_bytes()},
  };
  if (const Device* gpu = device.gpu()) {
    const DeviceInfo& info = gpu->info();
    json["gpu"] = {{"name", info.name},
                   {"arch", fmt::format("sm_{}{}", info.major, info.minor)},
                   {"uuid", info.uuid},
                   {"memory_bytes", info.total_bytes},
                   {"driver", info.driver},
                   {"toolkit", info.toolkit},
                   {"library", kernels::matmul_library(DeviceKind::cuda)}};
  }
  return json.dump(2) + "\n";
}

}  // namespace shardrun
