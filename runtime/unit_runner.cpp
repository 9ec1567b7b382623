#include "runtime/unit_runner.h"

#include <algorithm>

#include "runtime/range.h"

namespace shardrun {

UnitRunner::UnitRunner(const Model& model, Memory& memory, Stream& stream, GradientMath math,
                       RunnerOptions options)
    : model_(model),
      stream_(stream),
      options_(options),
      pool_(memory, stream, math),
      uses_(model.units().size(), 0),
      remaining_(model.units().size(), 0) {}

RandomKey UnitRunner::random_key(const Unit& unit, int use, uint64_t ordinal) const {
  const uint64_t site = mix64(mix64(hash_name(unit.path()), static_cast<uint64_t>(use)), ordinal);
  return shardrun::random_key(options_.seed, Purpose::dropout, site, position_.step, position_.leaf);
}

void UnitRunner::begin_leaf(LeafPosition position, bool training) {
  SHARDRUN_CHECK(call_count_ == 0, "a leaf begins while {} calls of the last one wait for backward",
                 call_count_);
  position_ = position;
  training_ = training;
  std::fill(uses_.begin(), uses_.end(), 0);
  std::fill(remaining_.begin(), remaining_.end(), 0);
}

void UnitRunner::for_each_unit(const Call& call, void (UnitRunner::*hook)(const Unit&)) {
  (this->*hook)(*call.unit);
  for (const Unit* owner : call.owners) {
    if (owner) (this->*hook)(*owner);
  }
}

Values UnitRunner::operator()(const Unit& unit, std::initializer_list<Value> inputs,
                              std::initializer_list<const Unit*> owners) {
  const Range range(unit.path().c_str());
  if (call_count_ == static_cast<int>(calls_.size())) calls_.push_back(std::make_unique<Call>());
  Call& call = *calls_[call_count_];
  call.unit = &unit;
  call.use = uses_[unit.index()]++;
  call.owners = {};
  SHARDRUN_CHECK(owners.size() <= call.owners.size(), "{}: too many owners of tied weights",
                 unit.path());
  std::copy(owners.begin(), owners.end(), call.owners.begin());
  const int k = options_.recompute_every;
  call.dropped = training_ && k > 0 && unit.index() % k == 0;

  const bool record = training_ && !call.dropped;
  for_each_unit(call, &UnitRunner::acquire);
  Values outputs = run_forward(call, {inputs.begin(), inputs.size()}, record ? &call.tape : nullptr);
  for_each_unit(call, &UnitRunner::release);
  if (!training_) {
    call.inner_inputs.clear();
    return outputs;
  }

  ++call_count_;
  for (const Value& input : inputs) {
    call.inputs.push(input);
    if (call.dropped) call.kept_inputs.push(input);
    if (is_floating(input.dtype())) pool_.count_use(input);
  }
  for (const Value& output : outputs) call.outputs.push(output);
  if (call.dropped) call.inner_inputs.clear();
  ++remaining_[unit.index()];
  for (const Unit* owner : owners) ++remaining_[owner->index()];
  return outputs;
}

Values UnitRunner::run_forward(Call& call, std::span<const Value> inputs, Tape* tape) {
  Values inner;
  for (const Value& input : inputs) {
    inner.push(pool_.alias(input));
    call.inner_inputs.push(inner[inner.size() - 1]);
  }
  UnitCall unit_call(*call.unit, call.use, *this, tape);
  return call.unit->forward(unit_call, {inner.begin(), static_cast<size_t>(inner.size())});
}

void UnitRunner::backward(const Loss& loss, float seed) {
  SHARDRUN_CHECK(static_cast<bool>(loss.sum), "backward without a loss");
  const Range range("backward");
  while (call_count_ > 0) backward_through(*calls_[--call_count_], seed);
}

// [Note: recomputation] A call whose tape was dropped runs forward once more, now recording. Ordinals of
// random draws start again, so the same numbers come; the gradients that arrived for the old outputs move
// to the new ones.
void UnitRunner::backward_through(Call& call, float seed) {
  const Range range(call.unit->path().c_str());
  for_each_unit(call, &UnitRunner::acquire);
  if (call.dropped) {
    const Values& kept = call.kept_inputs;
    Values again =
        run_forward(call, {kept.begin(), static_cast<size_t>(kept.size())}, &call.tape);
    for (int i = 0; i < again.size(); ++i) pool_.move_gradient(call.outputs[i], again[i]);
  }
  call.outputs.clear();
  call.tape.backward(pool_, *this, stream_, seed);
  for (int i = 0; i < call.inputs.size(); ++i) {
    if (!is_floating(call.inputs[i].dtype())) continue;
    Value gradient = pool_.take_gradient(call.inner_inputs[i]);
    if (gradient) pool_.add_gradient(call.inputs[i], std::move(gradient));
  }
  call.kept_inputs.clear();
  call.inner_inputs.clear();
  call.inputs.clear();
  for_each_unit(call, &UnitRunner::release);
  for_each_unit(call, &UnitRunner::count_down);
}

void UnitRunner::count_down(const Unit& unit) {
  if (--remaining_[unit.index()] == 0) gradients_complete(unit);
}

}  // namespace shardrun
