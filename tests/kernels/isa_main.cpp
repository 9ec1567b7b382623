#include "tests/kernels/isa_main.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace shardrun {

static Isa level = Isa::baseline;
Isa test_isa() {
  return level;
}

}  // namespace shardrun

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  shardrun::level = shardrun::isa_from_name(argc > 1 ? argv[1] : "auto");
  if (shardrun::level > shardrun::detect_isa()) {
    std::printf("this processor is without %s: nothing run\n", argv[1]);
    return 0;
  }
  shardrun::flush_denormals_on_this_thread();
  return RUN_ALL_TESTS();
}
