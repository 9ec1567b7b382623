// Which GPU a rank takes, what is refused and with which words, and what a GPU does to the numerics key.
#include "launch/train/rank_device.h"

#include <gtest/gtest.h>

#include <mutex>
#include <optional>

#include "launch/train/environment.h"
#include "launch/train/job.h"
#include "tests/launch/expect_error.h"
#include "tests/virtual_cuda/nccl.h"
#include "tests/virtual_cuda/runtime.h"

namespace shardrun {
namespace {

using virtual_cuda::Settings;

Config config_of(std::vector<std::string> words) {
  return with_defaults(parse_config(words));
}

// `body` on each of `ranks` thread ranks, all on one node. Throws what a job would print.
void on_ranks(int ranks, const std::function<void(RankContext&)>& body) {
  std::mutex mutex;
  std::optional<Error> printed;
  try {
    run_thread_ranks(ranks, [&](Communicator& comm) {
      RankContext context{comm, comm.rank(), comm.size(), ""};
      try {
        body(context);
      } catch (const AgreedError& error) {
        std::lock_guard lock(mutex);
        if (error.prints()) printed = error;
        throw;
      }
    });
  } catch (const AgreedError&) {
    throw Error(*printed);
  }
}

class RankDevices : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(virtual_cuda::living().allocations, 0);
    virtual_cuda::reset();
  }
  static std::vector<std::string> names(int ranks, const Config& config) {
    std::vector<std::string> names(static_cast<size_t>(ranks));
    on_ranks(ranks, [&](RankContext& context) {
      RankDevice device(config, context);
      names[static_cast<size_t>(context.comm.rank())] = device.name();
    });
    return names;
  }
};

TEST_F(RankDevices, EachRankTakesAGpuOfItsOwn) {
  Settings settings;
  settings.devices = 3;
  virtual_cuda::reset(settings);
  const std::vector<std::string> got = names(3, config_of({"--device", "cuda"}));
  for (int r = 0; r < 3; ++r) {
    EXPECT_NE(got[static_cast<size_t>(r)].find(fmt::format("GPU {}", r)), std::string::npos);
  }
  EXPECT_EQ(names(2, config_of({"--device", "auto"}))[1], got[1]);
  EXPECT_EQ(names(1, config_of({"--device", "cuda:2"}))[0], got[2]);
  EXPECT_EQ(names(4, config_of({"--device", "cpu"})), std::vector<std::string>(4, "cpu"));
}

TEST_F(RankDevices, SharingAGpuHasToBeAskedFor) {
  Settings settings;
  settings.devices = 2;
  virtual_cuda::reset(settings);
  expect_error(ExitCode::unavailable, {"ranks 0 and 2", "share GPU 0", "--comm mpi"}, [&] {
    names(3, config_of({"--device", "cuda"}));
  });
  expect_error(ExitCode::unavailable, {"ranks 0 and 1", "share GPU 1"}, [&] {
    names(2, config_of({"--device", "cuda:1"}));
  });
  const auto shared = names(3, config_of({"--device", "cuda", "--comm", "mpi"}));
  EXPECT_EQ(shared[0], shared[2]);
  EXPECT_NE(shared[0], shared[1]);
}

TEST_F(RankDevices, TensorsGoByNcclWhereEachRankHasAGpu) {
  const auto transports = [](int ranks, std::vector<std::string> words) {
    std::vector<std::string> out(static_cast<size_t>(ranks));
    words.insert(words.begin(), {"--device", "cuda"});
    on_ranks(ranks, [&](RankContext& context) {
      RankDevice device(config_of(words), context);
      out[static_cast<size_t>(context.comm.rank())] = device.comm().transport();
    });
    return out;
  };
  Settings settings;
  settings.devices = 3;
  virtual_cuda::reset(settings);
  const auto all = [](int ranks, const char* name) {
    return std::vector<std::string>(static_cast<size_t>(ranks), name);
  };
  EXPECT_EQ(transports(3, {}), all(3, "nccl"));
  EXPECT_EQ(transports(1, {}), all(1, "staged:thread"));
  EXPECT_EQ(transports(1, {"--comm", "nccl"}), all(1, "nccl"));
  EXPECT_EQ(transports(4, {"--comm", "staged"}), all(4, "staged:thread"));
  EXPECT_EQ(transports(2, {"--comm", "mpi"}), all(2, "staged:thread"));
  expect_error(ExitCode::unavailable, {"ranks 0 and 3", "share GPU 0", "--comm staged"},
               [&] { transports(4, {"--comm", "nccl"}); });
  expect_error(ExitCode::config, {"--comm nccl", "--device cuda"},
               [&] { names(2, config_of({"--device", "cpu", "--comm", "nccl"})); });
}

// The arena is made known to NCCL, and NCCL goes first.
TEST_F(RankDevices, NcclKnowsTheArena) {
  on_ranks(2, [&](RankContext& context) {
    RankDevice device(config_of({"--device", "cuda", "--workspace", "1048576"}), context);
    device.plan_memory(context, 1, [](int64_t, Communicator&, Memory& memory, Stream&) {
      const Buffer kept = memory.allocate(4096, "kept");
    });
    context.comm.barrier();
    EXPECT_EQ(virtual_cuda::living_nccl().buffers, 2);
    context.comm.barrier();
  });
  EXPECT_EQ(virtual_cuda::living_nccl().communicators, 0);
  EXPECT_EQ(virtual_cuda::living_nccl().buffers, 0);
}

TEST_F(RankDevices, SaysWhyThereIsNone) {
  Settings settings;
  settings.devices = 2;
  virtual_cuda::reset(settings);
  expect_error(ExitCode::unavailable, {"cuda:2", "2 GPUs"}, [&] {
    names(1, config_of({"--device", "cuda:2"}));
  });
  settings.devices = 0;
  settings.driver = 0;
  virtual_cuda::reset(settings);
  expect_error(ExitCode::unavailable, {"--device cuda", "driver"}, [&] {
    names(2, config_of({"--device", "cuda"}));
  });
  EXPECT_EQ(names(1, config_of({}))[0], "cpu");
}

TEST_F(RankDevices, OldGpusHaveNoBf16) {
  Settings settings;
  settings.architecture = "sm_75";
  virtual_cuda::reset(settings);
  on_ranks(1, [&](RankContext& context) {
    RankDevice device(config_of({"--device", "cuda"}), context);
    expect_error(ExitCode::config, {"bf16", "sm_75", "fp16"},
                 [&] { device.require(Precision::bf16); });
    EXPECT_FALSE(device.has(Precision::bf16_true));
    device.require(Precision::fp16);
    device.require(Precision::fp32);
  });
}

TEST_F(RankDevices, TooLittleMemoryNamesTheMicroBatchThatFits) {
  Settings settings;
  settings.memory_bytes = size_t{48} << 20;
  virtual_cuda::reset(settings);
  on_ranks(1, [&](RankContext& context) {
    RankDevice device(config_of({"--device", "cuda", "--workspace", "1048576"}), context);
    // 4 MiB a sequence beside 10 MiB: 9 sequences in the 47 MiB that the workspace leaves.
    const auto rehearsal = [](int64_t micro_batch, Communicator&, Memory& memory, Stream&) {
      const Buffer kept = memory.allocate(size_t{10} << 20, "kept");
      memory.begin("micro_step");
      Buffer activations = memory.allocate(static_cast<size_t>(micro_batch) << 22, "activations");
      activations.reset();
      memory.end();
    };
    expect_error(ExitCode::unavailable,
                 {"asked 74.0 MiB", "10.0 MiB kept", "64.0 MiB in a step",
                  "a workspace of 1.0 MiB (--workspace)", "free 47.0 MiB",
                  "--micro-batch 9 is the largest that fits (46.0 MiB)"},
                 [&] { device.plan_memory(context, 16, rehearsal); });
    expect_error(ExitCode::unavailable, {"No micro-batch fits", "--zero"}, [&] {
      device.plan_memory(
          context, 2, [&](int64_t micro_batch, Communicator& comm, Memory& memory, Stream& stream) {
            const Buffer more = memory.allocate(size_t{40} << 20, "more");
            rehearsal(micro_batch, comm, memory, stream);
          });
    });
    device.plan_memory(context, 9, rehearsal);
    EXPECT_EQ(device.plan().arena_bytes(), size_t{46} << 20);
  });
}

TEST_F(RankDevices, TheKeyAndTheEnvironmentNameTheGpu) {
  on_ranks(1, [&](RankContext& context) {
    const Config config = config_of({"--device", "cuda"});
    RankDevice device(config, context);
    const std::string key = numerics_key(config, StepOptions(), device);
    const std::string json = environment_json(context, device, key);
    for (const std::string& text :
         {device.gpu()->info().name, std::string("sm_90"), std::string("cuBLASLt")}) {
      EXPECT_NE(key.find(text), std::string::npos) << text << " in " << key;
      EXPECT_NE(json.find(text), std::string::npos) << text << " in " << json;
    }
    EXPECT_NE(json.find(device.gpu()->info().driver), std::string::npos);
    EXPECT_EQ(key.find("processor="), std::string::npos);
  });
}

}  // namespace
}  // namespace shardrun
