// A GPT on the plain runner, one call from tokens to loss and gradients.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/ops/gradient_math.h"
#include "models/gpt.h"
#include "runtime/plain_runner.h"

namespace shardrun {

using Bits = std::vector<std::byte>;

class PlainGpt {
 public:
  explicit PlainGpt(const GptConfig& config, RunnerOptions options = {}, int threads = 1)
      : model_(config),
        threads_(threads),
        stream_(DeviceKind::cpu, detect_isa(), &threads_),
        memory_(make_heap_memory()),
        runner_(model_, *memory_, stream_, gradient_math(), options) {
    flush_denormals_on_this_thread();
  }

  const Gpt& model() const { return model_; }
  PlainRunner& runner() { return runner_; }
  Stream& stream() { return stream_; }

  void for_each_parameter(
      const std::function<void(const ParameterSpec&, ParameterRef)>& body) const {
    for (const Unit* unit : model_.units()) {
      for (size_t i = 0; i < unit->parameters().size(); ++i) {
        body(unit->parameters()[i], {unit, static_cast<int>(i)});
      }
    }
  }

  struct LossSum {
    float sum = 0;
    int64_t valid = 0;
  };
  // tokens and targets have batch x (the rest) elements. Gradients are in runner().gradient_of().
  LossSum loss_and_gradients(std::vector<int32_t> tokens, std::vector<int32_t> targets,
                             int64_t batch, float seed = 1, bool training = true) {
    const Shape shape{batch, static_cast<int64_t>(tokens.size()) / batch};
    runner_.begin_leaf({.step = 3, .leaf = 5}, training);
    const Loss loss = model_.forward(
        runner_, {runner_.pool().wrap({tokens.data(), Dtype::int32, shape}),
                  runner_.pool().wrap({targets.data(), Dtype::int32, shape})});
    if (training) runner_.backward(loss, seed);
    return {*loss.sum.tensor().as<float>(), *loss.valid.tensor().as<int64_t>()};
  }

  std::map<std::string, Bits> gradients() {
    std::map<std::string, Bits> out;
    for_each_parameter([&](const ParameterSpec& spec, ParameterRef ref) {
      const ConstTensor gradient = runner_.gradient_of(ref);
      Bits& bits = out[spec.name];
      bits.resize(gradient.bytes());
      std::memcpy(bits.data(), gradient.data(), gradient.bytes());
    });
    return out;
  }

 private:
  Gpt model_;
  ThreadPool threads_;
  Stream stream_;
  std::unique_ptr<Memory> memory_;
  PlainRunner runner_;
};

}  // namespace shardrun
