// A user's own model on the installed library: a network that learns which token follows which, trained
// fully sharded over threads of this process. It trains once on one rank and once on three, and leaves
// with 1 unless the loss fell and both learnt the same, to the last bit.
#include <bit>
#include <cstdio>
#include <memory>
#include <vector>

#include "kernels/ops/ops.h"
#include "runtime/random.h"
#include "sharding/train_step.h"

using namespace shardrun;

namespace {

constexpr int64_t kVocabulary = 64, kWidth = 48, kHidden = 96, kLayers = 2;
constexpr int64_t kSequence = 32, kMicroBatch = 4, kGlobalBatch = 20, kSteps = 60;

// ---- the model: units declare parameters and say what forward does; backward follows from the ops.
// Shape suffixes: B batch, T time, C channels (kWidth), H hidden (kHidden), V vocabulary.

class Embedding : public Unit {
 public:
  Embedding() : Unit("embedding") {
    table_ = declare({.name = "table", .shape = {kVocabulary, kWidth}, .init_std = 0.1f});
  }
  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    return ops::embedding(call, inputs[0], call.parameter(table_), {});
  }

 private:
  int table_;
};

// x + down(gelu(up(norm(x)))): what a rank gathers, uses and lets go of at once.
class Layer : public Unit {
 public:
  explicit Layer(const std::string& path) : Unit(path) {
    norm_ = declare({.name = path + ".norm", .shape = {kWidth}, .init_mean = 1});
    up_ = declare({.name = path + ".up", .shape = {kHidden, kWidth}, .init_std = 0.1f});
    down_ = declare({.name = path + ".down", .shape = {kWidth, kHidden}, .init_std = 0.1f});
  }
  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    const Value& x_BTC = inputs[0];
    const Value normed_BTC = ops::layer_norm(call, x_BTC, call.parameter(norm_), {});
    const Value up_BTH = ops::linear(call, normed_BTC, call.parameter(up_), {});
    const Value hidden_BTH = ops::gelu(call, up_BTH);
    return ops::add(call, x_BTC, ops::linear(call, hidden_BTH, call.parameter(down_), {}));
  }

 private:
  int norm_, up_, down_;
};

// Logits, or with targets the loss.
class Head : public Unit {
 public:
  Head() : Unit("head") {
    weight_ = declare({.name = "head.weight", .shape = {kVocabulary, kWidth}, .init_std = 0.1f});
    bias_ = declare({.name = "head.bias", .shape = {kVocabulary}});
  }
  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    const Value logits_BTV =
        ops::linear(call, inputs[0], call.parameter(weight_), call.parameter(bias_));
    if (inputs.size() == 1) return logits_BTV;
    return ops::cross_entropy(call, logits_BTV, inputs[1], kVocabulary);
  }

 private:
  int weight_, bias_;
};

class Successor : public Model {
 public:
  Successor() {
    add(embedding_);
    for (int64_t i = 0; i < kLayers; ++i) {
      layers_.push_back(std::make_unique<Layer>("layer." + std::to_string(i)));
      add(*layers_.back());
    }
    add(head_);
  }
  Loss forward(UnitRunner& run, const Batch& batch) const override {
    const Values loss = run(head_, {features(run, batch.tokens), batch.targets});
    return {loss[0], loss[1]};
  }
  Value predict(UnitRunner& run, const Value& tokens) const override {
    return run(head_, {features(run, tokens)});
  }
  int64_t vocabulary() const override { return kVocabulary; }

 private:
  Value features(UnitRunner& run, const Value& tokens) const {
    Value x_BTC = run(embedding_, {tokens});
    for (const auto& layer : layers_) x_BTC = run(*layer, {x_BTC});
    return x_BTC;
  }

  Embedding embedding_;
  std::vector<std::unique_ptr<Layer>> layers_;
  Head head_;
};

// ---- the data: after t comes 5 t + 3, but for one token in eight. A leaf is a function of step and leaf,
// never of the rank that happens to compute it.

class SuccessorLeaves : public LeafSource {
 public:
  void training_leaf(int64_t step, int64_t leaf, Tensor tokens, Tensor targets) override {
    fill(mix64(static_cast<uint64_t>(step), static_cast<uint64_t>(leaf)), tokens, targets);
  }
  void evaluation_leaf(int64_t leaf, Tensor tokens, Tensor targets) override {
    fill(mix64(~uint64_t{0}, static_cast<uint64_t>(leaf)), tokens, targets);
  }

 private:
  static void fill(uint64_t key, Tensor tokens, Tensor targets) {
    uint64_t token = key % kVocabulary;
    for (int64_t i = 0; i < tokens.numel(); ++i) {
      tokens.as<int32_t>()[i] = static_cast<int32_t>(token);
      const uint64_t draw = mix64(key, static_cast<uint64_t>(i));
      token = draw % 8 == 0 ? draw / 8 % kVocabulary : (5 * token + 3) % kVocabulary;
      targets.as<int32_t>()[i] = static_cast<int32_t>(token);
    }
  }
};

// ---- training

struct Result {
  double first_loss = 0, validation_loss = 0;
  std::vector<float> logits;  // of one held-out leaf: every parameter has a part in them
};

Result train(int world_size) {
  Result result;
  const auto rank_main = [&](Communicator& comm) {
    flush_denormals_on_this_thread();
    const Successor model;
    SuccessorLeaves leaves;
    ThreadPool pool(1);
    Stream stream(DeviceKind::cpu, detect_isa(), &pool);
    const std::unique_ptr<Memory> memory = make_heap_memory();
    StepOptions options;
    options.shard = {.world_size = comm.size(), .zero = 3, .precision = Precision::bf16};
    options.micro_batch = kMicroBatch;
    options.global_batch = kGlobalBatch;
    options.seq_len = kSequence;

    TrainStep step(model, options, "none", comm, *memory, stream);
    step.initialize();
    double first_loss = 0;
    for (int64_t s = 0; s < kSteps; ++s) {
      const StepReport report = step(s, 1e-2, leaves);
      if (s == 0) first_loss = report.decision.loss;
    }
    const Evaluation evaluation = step.evaluate(8, leaves);

    std::vector<int32_t> tokens(kMicroBatch * kSequence), targets(tokens.size());
    std::vector<float> logits(tokens.size() * kVocabulary);
    const Shape shape{kMicroBatch, kSequence};
    leaves.evaluation_leaf(0, {tokens.data(), Dtype::int32, shape}, {targets.data(), Dtype::int32, shape});
    step.predict({logits.data(), Dtype::fp32, {kMicroBatch, kSequence, kVocabulary}},
                 {tokens.data(), Dtype::int32, shape});
    if (comm.rank() == 0) result = {first_loss, evaluation.loss, logits};
  };
  run_thread_ranks(world_size, rank_main, 60);
  std::printf("%d rank%s: loss %.4f at first, %.4f on held-out data after %lld steps\n", world_size,
              world_size == 1 ? "" : "s", result.first_loss, result.validation_loss,
              static_cast<long long>(kSteps));
  return result;
}

bool same_bits(const Result& a, const Result& b) {
  bool same = std::bit_cast<uint64_t>(a.validation_loss) == std::bit_cast<uint64_t>(b.validation_loss);
  for (size_t i = 0; i < a.logits.size(); ++i) {
    same = same && std::bit_cast<uint32_t>(a.logits[i]) == std::bit_cast<uint32_t>(b.logits[i]);
  }
  return same;
}

}  // namespace

int main() try {
  const Result one = train(1), three = train(3);
  const bool fell = one.validation_loss < one.first_loss / 2;
  const bool same = same_bits(one, three);
  std::printf("the loss %s; one rank and three %s\n", fell ? "fell" : "DID NOT FALL",
              same ? "learnt the same, to the last bit" : "DIFFER");
  return fell && same ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "train_successor: %s\n", error.what());
  return static_cast<int>(error.code());
}
