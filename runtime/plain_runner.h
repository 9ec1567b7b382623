// The runner without shards: every parameter of a model on one rank in the activations' dtype, and
// the fp32 gradients of one leaf. Tests and tools use it; a model that runs here runs sharded, for
// the rule that a unit may only read its own parameters and its owners' is held here, too.
#pragma once

#include <vector>

#include "runtime/unit_runner.h"

namespace shardrun {

// Writes elements [begin, begin + numel of out) of a parameter's initial values, in model space, to
// `out` (fp32): kernels::initialize_range, handed in since maths lives a floor above.
using InitialValues = void (*)(Tensor out, const ParameterSpec& spec, int64_t begin, uint64_t seed,
                               Stream& stream);

class PlainRunner : public UnitRunner {
 public:
  PlainRunner(const Model& model, Memory& memory, Stream& stream, GradientMath math,
              RunnerOptions options);

  // Gives every parameter its initial value, of options.seed.
  void initialize(InitialValues initial_values);

  // While the unit (or a unit that names it as an owner) runs.
  ConstTensor parameter(ParameterRef ref) override;
  GradientTarget gradient(ParameterRef ref) override;

  // Any time, in the parameter's padded shape. Gradients are those of the last leaf that ran
  // backward through the unit: zero for a parameter that it did not use, or before any leaf.
  Tensor value_of(ParameterRef ref) { return place(ref).value.tensor; }
  Tensor gradient_of(ParameterRef ref) { return place(ref).gradient.tensor; }

 private:
  struct Place {
    OwnedTensor value;
    OwnedTensor gradient;
    bool touched = false;  // by the backward that is running
  };
  struct UnitPlaces {
    std::vector<Place> places;  // per parameter
    int acquired = 0;
  };

  Place& place(ParameterRef ref) { return units_[ref.unit->index()].places[ref.index]; }
  void zero(Tensor tensor);
  void acquire(const Unit& unit) override;
  void release(const Unit& unit) override;
  void gradients_complete(const Unit& unit) override;

  Memory& memory_;
  GradientMath math_;
  uint64_t seed_;
  std::vector<UnitPlaces> units_;  // by Unit::index()
};

}  // namespace shardrun
