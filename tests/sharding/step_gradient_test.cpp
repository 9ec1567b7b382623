// The training step against the plain runner: the gradient sums that a sharded step leaves behind
// are, bit for bit, the leaf gradients of an unsharded model added in order of leaf.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/initialize.h"
#include "kernels/ops/gradient_math.h"
#include "runtime/plain_runner.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

constexpr int64_t kLeaves = 4, kMicroBatch = 2;
constexpr uint64_t kStepSeed = 42;

struct Sums {
  std::map<std::string, std::vector<float>> gradients;  // model space, scaled as backward left them
  double loss = 0;                                      // mean
  double norm = 0;                                      // of the mean gradient
};

Sums unsharded(const GptConfig& config, Precision precision, float seed) {
  const Gpt model(config);
  ThreadPool pool(1);
  Stream stream(DeviceKind::cpu, detect_isa(), &pool);
  const auto memory = make_heap_memory();
  PlainRunner runner(model, *memory, stream, gradient_math(),
                     {.seed = kStepSeed, .activation_dtype = compute_dtype(precision)});
  runner.initialize(kernels::initialize_range);
  SyntheticLeaves leaves(config.vocabulary);
  Sums sums;
  int64_t valid = 0;
  for (int64_t leaf = 0; leaf < kLeaves; ++leaf) {
    const Shape shape{kMicroBatch, config.context};
    runner.begin_leaf({.step = 0, .leaf = leaf}, true);
    Batch batch{runner.pool().make(Dtype::int32, shape, "tokens"),
                runner.pool().make(Dtype::int32, shape, "targets")};
    leaves.training_leaf(0, leaf, batch.tokens, batch.targets);
    const Loss loss = model.forward(runner, batch);
    runner.backward(loss, seed);
    sums.loss += static_cast<double>(*loss.sum.tensor().as<float>());
    valid += *loss.valid.tensor().as<int64_t>();
    for (const Unit* unit : model.units()) {
      for (size_t i = 0; i < unit->parameters().size(); ++i) {
        const ParameterSpec& spec = unit->parameters()[i];
        const float* gradient = runner.gradient_of({unit, static_cast<int>(i)}).as<float>();
        std::vector<float>& sum = sums.gradients[spec.name];
        sum.resize(spec.shape.numel());
        for (size_t e = 0; e < sum.size(); ++e) {
          sum[e] = leaf == 0 ? gradient[e] : sum[e] + gradient[e];
        }
      }
    }
  }
  sums.loss /= static_cast<double>(valid);
  double squares = 0;
  for (const auto& [name, sum] : sums.gradients) {
    for (float g : sum) squares += static_cast<double>(g) * static_cast<double>(g);
  }
  sums.norm = std::sqrt(squares) / static_cast<double>(seed) / static_cast<double>(valid);
  return sums;
}

Sums sharded(const GptConfig& config, Precision precision, int world_size, int zero, int recompute,
             const std::string& scaler) {
  Sums sums;
  std::mutex mutex;
  run_thread_ranks(
      world_size,
      [&](Communicator& comm) {
        flush_denormals_on_this_thread();
        const Gpt model(config);
        ThreadPool pool(1);
        Stream stream(DeviceKind::cpu, detect_isa(), &pool);
        const auto memory = make_heap_memory();
        StepOptions options;
        options.shard = {.world_size = world_size,
                         .zero = zero,
                         .precision = precision,
                         .wire = Dtype::fp32,
                         .sum_block = 1,
                         .reduce_every = ReduceEvery::micro_step,
                         .keep_fp32 = {}};
        options.seed = kStepSeed;
        options.micro_batch = kMicroBatch;
        options.global_batch = kMicroBatch * kLeaves;
        options.seq_len = config.context;
        options.recompute_every = recompute;
        TrainStep step(model, options, scaler, comm, *memory, stream);
        step.initialize();
        SyntheticLeaves leaves(config.vocabulary);
        const StepReport report = step(0, 1e-3, leaves);
        EXPECT_TRUE(report.decision.apply());

        std::lock_guard lock(mutex);
        sums.loss = report.decision.loss;
        sums.norm = report.decision.norm;
        for (UnitState& unit : step.state().units()) {
          for (size_t s = 0; s < unit.segments.size(); ++s) {
            SegmentState& part = unit.segments[s];
            ShardState::for_each_piece(
                *unit.plan, static_cast<int>(s), comm.rank() * part.plan->slice, part.plan->slice,
                [&](const ParameterPlace& place, int64_t begin, int64_t in_range, int64_t count) {
                  std::vector<float>& sum = sums.gradients[place.spec->name];
                  sum.resize(place.numel, NAN);
                  const float* slice = part.sum.total.as<float>() + in_range;
                  std::copy(slice, slice + count, sum.begin() + begin);
                });
          }
        }
      },
      60);
  return sums;
}

void expect_equal(const Sums& got, const Sums& want) {
  EXPECT_NEAR(got.loss, want.loss, 1e-14 * want.loss);
  EXPECT_NEAR(got.norm, want.norm, 1e-13 * want.norm);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    SCOPED_TRACE(name);
    const std::vector<float>& other = got.gradients.at(name);
    ASSERT_EQ(other.size(), gradient.size());
    EXPECT_TRUE(std::any_of(gradient.begin(), gradient.end(), [](float g) { return g != 0; }));
    for (size_t e = 0; e < gradient.size(); ++e) {
      ASSERT_EQ(std::memcmp(&other[e], &gradient[e], sizeof(float)), 0)
          << "element " << e << " got " << other[e] << " want " << gradient[e];
    }
  }
}

TEST(StepGradient, SumsOfAShardedStepAreThoseOfThePlainRunner) {
  flush_denormals_on_this_thread();
  for (bool bias : {true, false}) {
    GptConfig config = tiny_gpt();  // drops out: the plain runner must draw the same numbers
    config.bias = bias;
    for (Precision precision : {Precision::fp32, Precision::bf16}) {
      const float nominal = static_cast<float>(kMicroBatch * config.context);
      const Sums want = unsharded(config, precision, 1 / nominal);
      for (int world_size : {1, 3}) {
        for (int zero : {0, 1, 2, 3}) {
          for (int recompute : {0, 1}) {
            SCOPED_TRACE(fmt::format("{} W={} zero={} recompute={} bias={}", name_of(precision),
                                     world_size, zero, recompute, bias));
            expect_equal(sharded(config, precision, world_size, zero, recompute, "none"), want);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// A scale of 2^16 shifts exponents and nothing else.
TEST(StepGradient, TheLossScaleIsASeed) {
  flush_denormals_on_this_thread();
  const GptConfig config = tiny_gpt();
  const float nominal = static_cast<float>(kMicroBatch * config.context);
  const Sums want = unsharded(config, Precision::fp16, 65536 / nominal);
  expect_equal(sharded(config, Precision::fp16, 3, 3, 0, "static:65536"), want);
}

}  // namespace
}  // namespace shardrun::test
