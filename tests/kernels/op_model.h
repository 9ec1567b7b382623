// Models made of lambdas, for tests of ops and runners, and two ops that only tests need: `source`
// makes a parameter an activation, so that gradients of activations can be read; `dot` is a loss
// that weighs every element differently.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/ops/gradient_math.h"
#include "runtime/plain_runner.h"
#include "tests/kernels/reference.h"

namespace shardrun {

class LambdaUnit : public Unit {
 public:
  using Forward = std::function<Values(UnitCall&, std::span<const Value>)>;

  LambdaUnit(const std::string& path, std::vector<ParameterSpec> specs, Forward forward)
      : Unit(path), forward_(std::move(forward)) {
    for (ParameterSpec& spec : specs) declare(std::move(spec));
  }
  Values forward(UnitCall& call, std::span<const Value> inputs) const override {
    return forward_(call, inputs);
  }

 private:
  Forward forward_;
};

// `forward` runs the units, which it finds in order of addition.
class LambdaModel : public Model {
 public:
  using Units = std::vector<std::unique_ptr<LambdaUnit>>;
  using Forward = std::function<Loss(UnitRunner&, const Batch&, const Units&)>;

  LambdaModel(Units units, Forward forward)
      : units_(std::move(units)), forward_(std::move(forward)) {
    for (const auto& unit : units_) add(*unit);
  }
  Loss forward(UnitRunner& run, const Batch& batch) const override {
    return forward_(run, batch, units_);
  }
  Value predict(UnitRunner&, const Value&) const override { return {}; }
  int64_t vocabulary() const override { return 0; }

 private:
  Units units_;
  Forward forward_;
};

inline void source_backward(BackwardCall& call) {
  const GradientTarget target = call.parameter_gradient(0);
  if (target.accumulate) {
    kernels::add(target.tensor, target.tensor, call.output_gradient(), call.stream());
  } else {
    kernels::cast(target.tensor, call.output_gradient(), call.stream());
  }
}
inline constexpr Op kSource{"source", source_backward};

inline Value source(UnitCall& call, ParameterRef ref) {
  const ConstTensor parameter = call.parameter(ref);
  Value y = call.make(parameter.dtype(), parameter.shape(), "source");
  kernels::copy_bytes(y, parameter, call.stream());
  call.record(kSource, {}, {y}, {}, {ref});
  return y;
}

// No bits are lost in any dtype: sixteenths between -1 and 1.
inline double dot_weight(int64_t i) { return std::round(16 * std::cos(0.9 * i + 0.4)) / 16; }

inline void dot_backward(BackwardCall& call) {
  Value dx = call.make_like_input(0);
  const Tensor out = dx.tensor();
  for (int64_t i = 0; i < out.numel(); ++i) {
    set(out.data(), out.dtype(), i, call.seed() * static_cast<float>(dot_weight(i)));
  }
  call.give(0, std::move(dx));
}
inline constexpr Op kDot{"dot", dot_backward, true};

inline Values dot(UnitCall& call, const Value& x) {
  Value sum = call.make(Dtype::fp32, Shape{1}, "dot");
  Value valid = call.make(Dtype::int64, Shape{1}, "valid");
  double total = 0;
  for (int64_t i = 0; i < x.shape().numel(); ++i) {
    total += dot_weight(i) * get(x.tensor().data(), x.dtype(), i);
  }
  *sum.tensor().as<float>() = static_cast<float>(total);
  *valid.tensor().as<int64_t>() = 1;
  call.record(kDot, {x}, {sum, valid}, {}, {});
  return {sum, valid};
}

// A PlainRunner with what it stands on.
class PlainRig {
 public:
  PlainRig(const Model& model, RunnerOptions options)
      : threads_(2),
        stream_(DeviceKind::cpu, detect_isa(), &threads_),
        memory_(make_heap_memory()),
        runner_(model, *memory_, stream_, gradient_math(), options) {
    flush_denormals_on_this_thread();
  }
  PlainRunner& runner() { return runner_; }

 private:
  ThreadPool threads_;
  Stream stream_;
  std::unique_ptr<Memory> memory_;
  PlainRunner runner_;
};

}  // namespace shardrun
