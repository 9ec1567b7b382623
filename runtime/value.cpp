#include "runtime/value.h"

#include <utility>

namespace shardrun {

struct ValueSlot {
  ValuePool* pool = nullptr;
  int handles = 0;         // Values and ValueIds: the slot is recycled at zero
  int memory_handles = 0;  // Values: memory goes at zero
  Tensor tensor;
  Buffer buffer;
  Value base;  // what an alias keeps alive
  int uses = 0;
  int arrived = 0;
  Value gradient;
};

Value::Value(const Value& other) : slot_(other.slot_) {
  if (!slot_) return;
  ++slot_->handles;
  ++slot_->memory_handles;
}

Value::~Value() {
  if (!slot_) return;
  if (--slot_->memory_handles == 0) {
    slot_->buffer.reset();
    slot_->base = Value();
  }
  if (--slot_->handles == 0) slot_->pool->recycle(slot_);
}

const Tensor& Value::tensor() const {
  SHARDRUN_CHECK(slot_ != nullptr, "an empty Value was read");
  return slot_->tensor;
}

ValueId::ValueId(const Value& value) : slot_(value.slot_) {
  if (slot_) ++slot_->handles;
}

ValueId::ValueId(const ValueId& other) : slot_(other.slot_) {
  if (slot_) ++slot_->handles;
}

ValueId::~ValueId() {
  if (slot_ && --slot_->handles == 0) slot_->pool->recycle(slot_);
}

const Shape& ValueId::shape() const { return slot_->tensor.shape(); }
Dtype ValueId::dtype() const { return slot_->tensor.dtype(); }

ValuePool::ValuePool(Memory& memory, Stream& stream, GradientMath math)
    : memory_(memory), stream_(stream), math_(math) {}
ValuePool::~ValuePool() = default;

ValueSlot* ValuePool::take_slot() {
  if (free_.empty()) {
    ValueSlot& slot = slots_.emplace_back();
    slot.pool = this;
    free_.reserve(slots_.size());
    free_.push_back(&slot);
  }
  ValueSlot* slot = free_.back();
  free_.pop_back();
  slot->handles = slot->memory_handles = 1;
  ++live_;
  return slot;
}

void ValuePool::recycle(ValueSlot* slot) {
  slot->tensor = Tensor();
  slot->uses = slot->arrived = 0;
  slot->gradient = Value();
  --live_;
  free_.push_back(slot);
}

Value ValuePool::make(Dtype dtype, const Shape& shape, const char* label) {
  OwnedTensor owned = allocate_tensor(memory_, dtype, shape, label);
  Value value(take_slot());
  value.slot_->tensor = owned.tensor;
  value.slot_->buffer = std::move(owned.buffer);
  return value;
}

Value ValuePool::wrap(const ConstTensor& tensor) {
  Value value(take_slot());
  value.slot_->tensor = Tensor(const_cast<void*>(tensor.data()), tensor.dtype(), tensor.shape());
  return value;
}

Value ValuePool::alias(const Value& value) {
  Value copy(take_slot());
  copy.slot_->tensor = value.tensor();
  copy.slot_->base = value;
  return copy;
}

void ValuePool::count_use(const ValueId& value) { ++value.slot_->uses; }

void ValuePool::add_gradient(const ValueId& value, Value gradient) {
  ValueSlot& slot = *value.slot_;
  ++slot.arrived;
  if (!slot.gradient) {
    slot.gradient = std::move(gradient);
    return;
  }
  const bool last = slot.arrived >= slot.uses;
  Value sum = make(last ? value.dtype() : Dtype::fp32, value.shape(), "gradient sum");
  math_.add(sum, slot.gradient, gradient, stream_);
  slot.gradient = std::move(sum);
}

Value ValuePool::take_gradient(const ValueId& value) {
  ValueSlot& slot = *value.slot_;
  Value gradient = std::move(slot.gradient);
  slot.gradient = Value();
  slot.uses = slot.arrived = 0;
  if (gradient && gradient.dtype() != value.dtype()) {  // a use that gave no gradient
    Value rounded = make(value.dtype(), value.shape(), "gradient sum");
    math_.cast(rounded, gradient, stream_);
    return rounded;
  }
  return gradient;
}

void ValuePool::move_gradient(const ValueId& from, const ValueId& to) {
  ValueSlot &source = *from.slot_, &target = *to.slot_;
  if (!source.gradient) {  // none came, or a unit returned one Value twice and it has moved already
    target.uses += std::exchange(source.uses, 0);
    return;
  }
  target.gradient = std::move(source.gradient);
  target.arrived = source.arrived;
  target.uses += source.uses;
  source.gradient = Value();
  source.uses = source.arrived = 0;
}

}  // namespace shardrun
