#include "sharding/unit_order.h"

#include "kernels/ops/gradient_math.h"
#include "runtime/memory.h"
#include "runtime/unit_runner.h"

namespace shardrun {

namespace {

class OrderRunner : public UnitRunner {
 public:
  OrderRunner(const Model& model, const ShardPlan& plan, Memory& memory, Stream& stream)
      : UnitRunner(model, memory, stream, gradient_math(),
                   {.activation_dtype = compute_dtype(plan.options().precision)}),
        plan_(plan) {}

  std::vector<UnitUse> order;

  ConstTensor parameter(ParameterRef ref) override {
    const UnitPlan& unit = plan_.unit(*ref.unit);
    const ParameterPlace& place = unit.places[ref.index];
    return Tensor(nullptr, unit.segments[place.segment].compute, place.spec->padded_shape());
  }
  GradientTarget gradient(ParameterRef ref) override {
    const ParameterPlace& place = plan_.unit(*ref.unit).places[ref.index];
    return {Tensor(nullptr, Dtype::fp32, place.spec->padded_shape()), false};
  }

 private:
  void acquire(const Unit& unit) override { order.push_back({unit.index(), calls_}); }
  void release(const Unit&) override { calls_ = order.back().call + 1; }
  void gradients_complete(const Unit&) override {}

  const ShardPlan& plan_;
  int calls_ = 0;
};

}  // namespace

std::vector<UnitUse> unit_order(const Model& model, const ShardPlan& plan, const Shape& tokens,
                                bool training) {
  RecordingMemory nothing;
  ThreadPool pool(1);
  Stream meta(DeviceKind::meta, Isa::baseline, &pool);
  OrderRunner runner(model, plan, nothing, meta);
  runner.begin_leaf({}, training);
  {
    const Batch batch{runner.pool().make(Dtype::int32, tokens, "tokens"),
                      runner.pool().make(Dtype::int32, tokens, "targets")};
    const Loss loss = model.forward(runner, batch);
    if (training) runner.backward(loss, 1);
  }
  return std::move(runner.order);
}

}  // namespace shardrun
