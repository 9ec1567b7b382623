#include "runtime/unit.h"

#include "runtime/unit_runner.h"

namespace shardrun {

Shape ParameterSpec::padded_shape() const {
  if (padded_rows <= 0) return shape;
  Shape padded{padded_rows};
  for (int i = 1; i < shape.rank(); ++i) padded.append(shape[i]);
  return padded;
}

int Unit::declare(ParameterSpec spec) {
  SHARDRUN_CHECK(spec.padded_rows == 0 || (spec.shape.rank() > 0 && spec.padded_rows >= spec.shape[0]),
                 "{}: {} padded rows for shape {}", spec.name, spec.padded_rows, spec.shape.text());
  parameters_.push_back(std::move(spec));
  return static_cast<int>(parameters_.size()) - 1;
}

void Model::add(Unit& unit) {
  unit.index_ = static_cast<int>(units_.size());
  units_.push_back(&unit);
}

int64_t Model::parameter_count() const {
  int64_t n = 0;
  for (const Unit* unit : units_) {
    for (const ParameterSpec& spec : unit->parameters()) n += spec.shape.numel();
  }
  return n;
}

Stream& UnitCall::stream() const { return runner_.stream(); }
bool UnitCall::training() const { return runner_.training(); }
ValuePool& UnitCall::pool() const { return runner_.pool(); }
Dtype UnitCall::activation_dtype() const { return runner_.activation_dtype(); }

Value UnitCall::make(Dtype dtype, const Shape& shape, const char* label) const {
  return runner_.pool().make(dtype, shape, label);
}

ConstTensor UnitCall::parameter(ParameterRef ref) {
  return ref ? runner_.parameter(ref) : ConstTensor();
}

GradientTarget UnitCall::gradient(ParameterRef ref) { return runner_.gradient(ref); }

RandomKey UnitCall::next_random_key() { return runner_.random_key(unit_, use_, ordinal_++); }

}  // namespace shardrun
