// What overlap is worth, counted from the schedule of the step on the device kind meta, and that the count
// is what arithmetic says.
#include "sharding/timeline.h"

#include <gtest/gtest.h>

#include <thread>

#include "models/presets.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {
namespace {

struct Spent {
  double seconds = 0, exposed = 0, communication = 0;
};

// A step of gpt2-124m in bf16, two leaves on each rank, at the speeds that `plan` assumes.
Spent step_of(int world, int zero, int prefetch) {
  const GptConfig gpt = preset("gpt2-124m");
  const Gpt model(gpt);
  StepOptions options;
  options.shard.world_size = world;
  options.shard.zero = zero;
  options.shard.precision = Precision::bf16;
  options.shard.wire = Dtype::bf16;
  options.micro_batch = 8;
  options.global_batch = 8 * 2 * world;
  options.seq_len = gpt.context;
  options.prefetch = prefetch;
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, detect_isa(), &pool);
  const auto comm = make_meta_communicator(0, world, "nccl");
  RecordingMemory recorder;
  SyntheticLeaves leaves(gpt.vocabulary);
  TrainStep step(model, options, "none", *comm, recorder, meta);
  step.initialize();
  Timeline timeline(meta, *comm, {4e14, 2.5e12, 1.5e11, 2e-5});
  step.runner().set_watch(&timeline);
  step(0, 1e-3, leaves);
  return {timeline.seconds(), timeline.exposed_seconds(), timeline.communication_seconds()};
}

TEST(Timeline, PrefetchHidesCommunication) {
  fmt::print(
      "gpt2-124m, bf16, micro-batch 8, 2 micro-steps; ms of a step, exposed of all "
      "communication\n");
  fmt::print("zero ranks  prefetch 0               prefetch 1               prefetch 2\n");
  for (const int zero : {2, 3}) {
    for (const int world : {2, 3, 4, 5, 6, 7, 8}) {
      fmt::print("{:4} {:5}", zero, world);
      Spent none;
      for (const int prefetch : {0, 1, 2}) {
        const Spent spent = step_of(world, zero, prefetch);
        fmt::print("  {:6.1f} {:5.1f} of {:5.1f}   ", spent.seconds * 1e3, spent.exposed * 1e3,
                   spent.communication * 1e3);
        if (prefetch == 0) {
          none = spent;
          EXPECT_NEAR(none.exposed, none.communication, 1e-9);
          continue;
        }
        EXPECT_LE(spent.communication, none.communication + 1e-9);
        EXPECT_LT(spent.exposed, 0.6 * none.exposed) << "zero " << zero << " ranks " << world;
        // Whatever is not exposed costs nothing: compute takes as long.
        EXPECT_NEAR(spent.seconds - spent.exposed, none.seconds - none.exposed, 1e-9);
      }
      fmt::print("\n");
    }
  }
}

// One flop a second, one byte a second, by hand.
TEST(Timeline, IsTwoClocks) {
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, Isa::baseline, &pool);
  const auto comm = make_meta_communicator(0, 2, "nccl");
  Timeline timeline(meta, *comm, {1, 1, 1, 3});
  const Lanes lanes{.compute = meta, .communication = meta, .overlap = true, .watch = &timeline};
  const auto gather = [&] {  // 4 bytes, and 3 to start: 7 seconds
    comm->all_gather(Tensor(nullptr, Dtype::fp32, {2}), Tensor(nullptr, Dtype::fp32, {1}), meta);
  };
  meta.count(10, 0);
  Loan first, second;
  first.begin(lanes);  // at 10, until 17
  gather();
  first.end(lanes);
  meta.count(5, 0);     // until 15
  second.begin(lanes);  // behind the first: until 24
  gather();
  second.end(lanes);
  first.settle(lanes);  // 2 late
  EXPECT_EQ(timeline.seconds(), 17);
  EXPECT_EQ(timeline.exposed_seconds(), 2);
  meta.count(0, 9);  // until 26: the second is hidden
  second.settle(lanes);
  second.settle(lanes);  // once
  EXPECT_EQ(timeline.seconds(), 26);
  gather();  // outside of loans nothing hides it
  EXPECT_EQ(timeline.seconds(), 33);
  EXPECT_EQ(timeline.exposed_seconds(), 9);
  EXPECT_EQ(timeline.communication_seconds(), 21);
}

TEST(Timeline, WithoutOverlapAllIsExposed) {
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, Isa::baseline, &pool);
  const auto comm = make_meta_communicator(0, 2, "nccl");
  Timeline timeline(meta, *comm, {1, 1, 1, 3});
  const Lanes lanes{.compute = meta, .communication = meta, .watch = &timeline};
  meta.count(10, 0);
  Loan loan;
  loan.begin(lanes);
  comm->all_gather(Tensor(nullptr, Dtype::fp32, {2}), Tensor(nullptr, Dtype::fp32, {1}), meta);
  loan.end(lanes);
  meta.count(5, 0);
  loan.settle(lanes);
  EXPECT_EQ(timeline.seconds(), 22);
  EXPECT_EQ(timeline.exposed_seconds(), 7);
}

// The other watch, on the host's clock.
TEST(ExposedClock, CountsWaitsAsOftenAsTheyWeigh) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::cpu, Isa::baseline, &pool);
  ExposedClock clock(stream);
  const Lanes lanes{.compute = stream, .communication = stream, .watch = &clock};
  const auto call = [&] {
    Loan loan;
    loan.begin(lanes);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    loan.end(lanes);
    loan.settle(lanes);
  };
  call();
  const double once = clock.take_seconds();
  EXPECT_GE(once, 0.02);
  EXPECT_EQ(clock.take_seconds(), 0);
  clock.weigh(50);
  call();
  EXPECT_GE(clock.take_seconds(), 1);
  clock.weigh(0);
  call();
  EXPECT_EQ(clock.take_seconds(), 0);
}

TEST(ExposedClock, OfAStep) {
  for (const int world : {1, 2}) {
    for (const int zero : {0, 1, 2, 3}) {
      StepCase c;
      c.gpt = tiny_gpt();
      c.world_size = world;
      c.zero = zero;
      for (const StepReport& report : run_steps(c).reports) {
        EXPECT_EQ(report.exposed_seconds > 0, world > 1) << c.text();
      }
    }
  }
}

}  // namespace
}  // namespace shardrun::test
