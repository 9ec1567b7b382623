#include "runtime/plain_runner.h"

#include <cstring>

namespace shardrun {

PlainRunner::PlainRunner(const Model& model, Memory& memory, Stream& stream, GradientMath math,
                         RunnerOptions options)
    : UnitRunner(model, memory, stream, math, options),
      memory_(memory),
      math_(math),
      seed_(options.seed),
      units_(model.units().size()) {
  for (const Unit* unit : model.units()) {
    UnitPlaces& own = units_[unit->index()];
    for (const ParameterSpec& spec : unit->parameters()) {
      Place& place = own.places.emplace_back();
      const Shape shape = spec.padded_shape();
      place.value = allocate_tensor(memory, options.activation_dtype, shape, "parameter");
      place.gradient = allocate_tensor(memory, Dtype::fp32, shape, "parameter gradient");
      zero(place.value.tensor);
      zero(place.gradient.tensor);
    }
  }
}

void PlainRunner::initialize(InitialValues initial_values) {
  for (const Unit* unit : model().units()) {
    for (size_t i = 0; i < unit->parameters().size(); ++i) {
      const ParameterSpec& spec = unit->parameters()[i];
      const Tensor whole = value_of({unit, static_cast<int>(i)});
      zero(whole);  // rows of padding have no initial values
      OwnedTensor exact =
          allocate_tensor(memory_, Dtype::fp32, Shape{spec.shape.numel()}, "initial values");
      initial_values(exact.tensor, spec, 0, seed_, stream());
      math_.cast(whole.flat(0, spec.shape.numel()), exact.tensor, stream());
    }
  }
}

// Zero is all bits zero in every dtype.
void PlainRunner::zero(Tensor tensor) {
  if (stream().computes()) std::memset(tensor.data(), 0, tensor.bytes());
}

ConstTensor PlainRunner::parameter(ParameterRef ref) {
  SHARDRUN_CHECK(units_[ref.unit->index()].acquired > 0,
                 "{} is read by a unit that does not name {} as an owner",
                 ref.unit->parameters()[ref.index].name, ref.unit->path());
  return value_of(ref);
}

GradientTarget PlainRunner::gradient(ParameterRef ref) {
  Place& target = place(ref);
  const bool accumulate = target.touched;
  target.touched = true;
  return {target.gradient.tensor, accumulate};
}

void PlainRunner::acquire(const Unit& unit) { ++units_[unit.index()].acquired; }
void PlainRunner::release(const Unit& unit) { --units_[unit.index()].acquired; }

void PlainRunner::gradients_complete(const Unit& unit) {
  for (Place& place : units_[unit.index()].places) {
    if (!place.touched) zero(place.gradient.tensor);
    place.touched = false;
  }
}

}  // namespace shardrun
