// The plan of each shipped preset: offsets within 10 % of the lower bound that lifetimes set, no two
// living blocks overlap, and model state is what arithmetic says.
#include <gtest/gtest.h>

#include <algorithm>

#include "models/presets.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

struct PlanCase {
  std::string model;
  int zero;
  Precision precision;
  int recompute;
  int64_t sequence;
};

struct Planned {
  MemoryPlan plan;
  int64_t parameters = 0;
};

Planned plan_of(const PlanCase& c, int world) {
  GptConfig gpt = preset(c.model);
  gpt.context = c.sequence;
  const Gpt model(gpt);
  StepOptions options;
  options.shard.world_size = world;
  options.shard.zero = c.zero;
  options.shard.precision = c.precision;
  options.micro_batch = 2;
  options.global_batch = 2 * world + 2;
  options.seq_len = c.sequence;
  options.recompute_every = c.recompute;
  options.prefetch = c.recompute;  // 0, 1 and 2, too
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, detect_isa(), &pool);
  const auto comm = make_meta_communicator(0, world, "mpi");
  RecordingMemory recorder;
  SyntheticLeaves leaves(gpt.vocabulary);
  TrainStep step(model, options, "none", *comm, recorder, meta);
  step.initialize();
  step(0, 1e-3, leaves);
  step.evaluate(1, leaves);
  return {recorder.plan(), model.parameter_count()};
}

class PlanOfPresets : public testing::TestWithParam<std::string> {};

TEST_P(PlanOfPresets, StaysNearTheLowerBound) {
  for (int zero : {0, 1, 2, 3}) {
    for (Precision precision : {Precision::fp32, Precision::bf16}) {
      for (int recompute : {0, 1, 2}) {
        const Planned planned = plan_of({GetParam(), zero, precision, recompute, 256}, 3);
        for (const MemoryPlan::Program& program : planned.plan.programs) {
          EXPECT_LE(program.arena_bytes, program.peak_bytes * 1.10)
              << GetParam() << " zero " << zero << " " << name_of(precision) << " recompute "
              << recompute << " " << program.name;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Presets, PlanOfPresets, testing::ValuesIn(preset_names()));

TEST(MemoryPlan, LivingBlocksNeverOverlap) {
  const Planned planned = plan_of({"gpt-nano", 3, Precision::bf16, 0, 64}, 2);
  for (const MemoryPlan::Program& program : planned.plan.programs) {
    const auto& blocks = program.blocks;
    for (size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_LE(blocks[i].offset + blocks[i].bytes, program.arena_bytes);
      for (size_t j = i + 1; j < blocks.size(); ++j) {
        const bool together = blocks[i].birth < blocks[j].death && blocks[j].birth < blocks[i].death;
        if (!together || blocks[i].bytes == 0 || blocks[j].bytes == 0) continue;
        EXPECT_TRUE(blocks[i].offset + blocks[i].bytes <= blocks[j].offset ||
                    blocks[j].offset + blocks[j].bytes <= blocks[i].offset)
            << program.name << " " << blocks[i].label << " " << blocks[j].label;
      }
    }
  }
}

// Kept bytes a parameter and rank: compute copy, master and two moments, gradient sum.
TEST(MemoryPlan, ModelStateIsWhatTheStageSays) {
  const int world = 4;
  struct Row {
    int zero;
    Precision precision;
    double bytes;  // a parameter, of one rank
  };
  for (const Row& row : {Row{0, Precision::bf16, 2 + 12 + 4}, Row{1, Precision::bf16, 2 + 16.0 / world},
                         Row{2, Precision::bf16, 2 + 16.0 / world},
                         Row{3, Precision::bf16, 18.0 / world}, Row{0, Precision::fp32, 16},
                         Row{2, Precision::fp32, 4 + 12.0 / world},
                         Row{3, Precision::fp32, 16.0 / world},
                         Row{3, Precision::bf16_true, 14.0 / world}}) {
    const Planned planned = plan_of({"gpt2-124m", row.zero, row.precision, 0, 64}, world);
    const double expected = row.bytes * static_cast<double>(planned.parameters);
    // Padding of the vocabulary (47 rows), of parameters and of slices: well under 0.1 %.
    EXPECT_GE(static_cast<double>(planned.plan.persistent_bytes), expected);
    EXPECT_LE(static_cast<double>(planned.plan.persistent_bytes), expected * 1.001)
        << "zero " << row.zero << " " << name_of(row.precision);
  }
}

}  // namespace
}  // namespace shardrun::test
