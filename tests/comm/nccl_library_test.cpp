// NCCL itself, where the build has it: needs the library, and no GPU.
#include <gtest/gtest.h>

#include <fstream>

#include "comm/communicator.h"

namespace shardrun {
namespace {

bool is_loaded(const std::string& library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(library) != std::string::npos) return true;
  }
  return false;
}

TEST(NcclLibrary, IsLoadedWhenFirstNeeded) {
  EXPECT_FALSE(is_loaded("libnccl"));
  EXPECT_EQ(nccl_unavailable(), "");
  EXPECT_EQ(nccl_library_version().rfind("2.", 0), 0u);
  EXPECT_TRUE(is_loaded("libnccl"));
}

}  // namespace
}  // namespace shardrun
