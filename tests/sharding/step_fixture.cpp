#include "tests/sharding/step_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/loss.h"
#include "runtime/random.h"

namespace shardrun::test {

GptConfig tiny_gpt() {
  GptConfig gpt;
  gpt.layers = 2;
  gpt.heads = 2;
  gpt.channels = 32;
  gpt.context = 16;
  gpt.vocabulary = 61;
  gpt.bias = true;
  gpt.dropout = 0.1f;
  return gpt;
}

static void fill_leaf(uint64_t key, int64_t vocabulary, Tensor tokens, Tensor targets) {
  int64_t token = static_cast<int64_t>(mix64(key) % static_cast<uint64_t>(vocabulary));
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    const int64_t next = (token * 5 + 3) % vocabulary;
    tokens.as<int32_t>()[i] = static_cast<int32_t>(token);
    targets.as<int32_t>()[i] =
        mix64(key, i + 1) % 7 == 0 ? kernels::kIgnoreTarget : static_cast<int32_t>(next);
    token = next;
  }
}

void SyntheticLeaves::training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) {
  fill_leaf(mix64(step * 1000 + leaf), vocabulary_, tokens, targets);
}

void SyntheticLeaves::evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) {
  fill_leaf(mix64(777777 + leaf), vocabulary_, tokens, targets);
}

static void collect(TrainStep& step, StepResult& result) {
  auto put = [&](const ParameterPlace& place, const char* kind, int64_t begin, const Tensor& tensor,
                 int64_t in_range, int64_t count) {
    const HostView view(tensor, step.runner().stream());
    std::vector<uint32_t>& bits = result.tensors[place.spec->name + "/" + kind];
    bits.resize(place.numel, 0xdeadbeef);
    for (int64_t i = 0; i < count; ++i) {
      uint32_t value = 0;
      const size_t size = size_of(tensor.dtype());
      std::memcpy(&value, view.data() + (in_range + i) * size, size);
      bits[begin + i] = value;
    }
  };
  for (UnitState& unit : step.state().units()) {
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      SegmentState& part = unit.segments[s];
      const bool whole = step.options().shard.zero == 0;
      ShardState::for_each_piece(
          *unit.plan, static_cast<int>(s), part.state_begin, part.state_size,
          [&](const ParameterPlace& place, int64_t begin, int64_t in_range, int64_t count) {
            if (part.master.present()) put(place, "master", begin, part.master, in_range, count);
            put(place, "moment1", begin, part.moment1, in_range, count);
            put(place, "moment2", begin, part.moment2, in_range, count);
            put(place, "compute", begin, whole ? part.compute_full : part.compute_slice, in_range,
                count);
          });
    }
  }
}

StepResult run_steps(const StepCase& c, const BeforeStep& before_step,
                     const AfterStep& after_step) {
  StepResult result;
  std::mutex mutex;
  run_thread_ranks(
      c.world_size,
      [&](Communicator& comm) {
        flush_denormals_on_this_thread();
        const std::unique_ptr<Model> made =
            c.make_model ? c.make_model() : std::make_unique<Gpt>(c.gpt);
        const Model& model = *made;
        ThreadPool pool(c.threads);
        std::unique_ptr<Device> gpu;
        std::unique_ptr<Stream> stream;
        std::unique_ptr<Communicator> staged;
        if (c.gpus > 0) {
          gpu = make_cuda_device(comm.rank() % c.gpus);
          stream = std::make_unique<Stream>(*gpu, size_t{1} << 20, Priority::compute);
          staged = c.nccl ? make_nccl_communicator(comm, *gpu, 50)
                          : make_staged_communicator(comm, *gpu);
        } else {
          stream = std::make_unique<Stream>(DeviceKind::cpu, detect_isa(), &pool);
        }
        StepOptions options;
        options.shard = {.world_size = c.world_size,
                         .zero = c.zero,
                         .precision = c.precision,
                         .wire = c.wire,
                         .sum_block = c.sum_block,
                         .reduce_every = c.reduce_every,
                         .keep_fp32 = {"*ln_1*"},
                         .reduction = c.reduction};
        options.update = c.update;
        options.seed = 42;
        options.micro_batch = 2;
        options.global_batch = 2 * c.leaves;
        options.seq_len = c.gpt.context;
        options.recompute_every = c.recompute;
        options.prefetch = c.prefetch;
        std::unique_ptr<Memory> memory = make_heap_memory(gpu.get());
        const std::unique_ptr<LeafSource> leaves =
            c.make_leaves ? c.make_leaves() : std::make_unique<SyntheticLeaves>(c.gpt.vocabulary);
        if (c.arena) {
          RecordingMemory recorder;
          Stream meta(DeviceKind::meta, detect_isa(), &pool);
          const auto meta_comm =
              make_meta_communicator(comm.rank(), c.world_size, c.nccl ? "nccl" : gpu ? "staged" : "thread");
          TrainStep rehearsal(model, options, c.scaler, *meta_comm, recorder, meta);
          rehearsal.initialize();
          rehearsal(0, 1e-3, *leaves);
          memory = make_arena_memory(recorder.plan(), gpu.get());
        }
        TrainStep step(model, options, c.scaler, staged ? *staged : comm, *memory, *stream);
        step.initialize();
        for (int64_t s = 0; s < c.steps; ++s) {
          if (s == c.left_out) continue;
          if (before_step) before_step(step, comm.rank(), s);
          const StepReport report = step(s, 1e-2, *leaves);
          if (after_step) after_step(step, comm.rank(), s, report);
          if (comm.rank() == 0) {
            result.reports.push_back(report);
            result.scales.push_back(step.scaler().scale());
            result.applied = step.applied_steps();
          }
        }
        std::lock_guard lock(mutex);
        collect(step, result);
      },
      60);
  return result;
}

void expect_same(const StepResult& expected, const StepResult& got, const std::string& what) {
  ASSERT_EQ(expected.tensors.size(), got.tensors.size()) << what;
  for (const auto& [name, bits] : expected.tensors) {
    const auto it = got.tensors.find(name);
    ASSERT_NE(it, got.tensors.end()) << what << ": " << name;
    ASSERT_EQ(bits.size(), it->second.size()) << what << ": " << name;
    const auto [a, b] = std::mismatch(bits.begin(), bits.end(), it->second.begin());
    ASSERT_EQ(a, bits.end()) << what << ": " << name << "[" << a - bits.begin() << "] is "
                             << std::hex << *b << ", wanted " << *a;
  }
  ASSERT_EQ(expected.reports.size(), got.reports.size()) << what;
  for (size_t s = 0; s < expected.reports.size(); ++s) {
    const Decision &a = expected.reports[s].decision, &b = got.reports[s].decision;
    EXPECT_EQ(std::bit_cast<uint64_t>(a.loss), std::bit_cast<uint64_t>(b.loss)) << what << " " << s;
    EXPECT_EQ(std::bit_cast<uint64_t>(a.norm), std::bit_cast<uint64_t>(b.norm)) << what << " " << s;
  }
}

void Poison::put_into(TrainStep& step) {
  plan = &step.state().plan();
  stream = &step.runner().stream();
  unit = -1;
  for (const UnitPlan& u : plan->units()) {
    for (const ParameterPlace& p : u.places) {
      if (p.spec->name != parameter) continue;
      unit = u.unit->index();
      segment = p.segment;
      place = p.offset + element;
    }
  }
  SHARDRUN_CHECK(unit >= 0, "no parameter {}", parameter);
  seen_unit = nullptr;
  seen_leaf = -1;
  step.runner().set_gradient_hook(
      [](void* context, int64_t at, const Unit& here, Tensor gradient) {
        Poison& p = *static_cast<Poison*>(context);
        if (&here != p.seen_unit || at != p.seen_leaf) p.seen = 0;
        p.seen_unit = &here;
        p.seen_leaf = at;
        const int s = p.seen++;
        const bool here_it_is = at == p.leaf && here.index() == p.unit && s == p.segment;
        if (!p.alone && !here_it_is) return;
        const HostView view(gradient, *p.stream);
        float* values = const_cast<float*>(view.as<float>());
        if (p.alone) std::fill(values, values + gradient.numel(), 0.0f);
        if (here_it_is) values[p.place] = p.value;
        if (!p.stream->device()) return;  // the view is the gradient
        copy_from_host(gradient, values, *p.stream);
        p.stream->synchronize();
      },
      this);
}

}  // namespace shardrun::test
