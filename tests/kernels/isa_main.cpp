#include "tests/kernels/isa_main.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "runtime/error.h"

namespace shardrun {

static Isa level = Isa::baseline;
Isa test_isa() {
  return level;
}

}  // namespace shardrun

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    shardrun::level = shardrun::isa_from_name(argc > 1 ? argv[1] : "auto");
  } catch (const shardrun::DeviceError& error) {  // not this processor's
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  shardrun::flush_denormals_on_this_thread();
  return RUN_ALL_TESTS();
}
