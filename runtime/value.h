// A Value is a handle to one tensor of a leaf: an activation, a gradient, a batch's tokens. Copies share
// the tensor; its memory is freed when the last Value goes. Handles belong to one thread.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "runtime/memory.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun {

class ValuePool;
struct ValueSlot;

class Value {
 public:
  Value() = default;
  Value(const Value& other);
  Value(Value&& other) noexcept : slot_(other.slot_) { other.slot_ = nullptr; }
  Value& operator=(Value other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~Value();

  explicit operator bool() const { return slot_ != nullptr; }
  const Tensor& tensor() const;
  operator ConstTensor() const { return tensor(); }  // NOLINT: kernels read Values as tensors
  operator Tensor() const { return tensor(); }       // NOLINT: kernels write fresh Values
  const Shape& shape() const { return tensor().shape(); }
  Dtype dtype() const { return tensor().dtype(); }
  bool same_as(const Value& other) const { return slot_ == other.slot_; }

 private:
  friend class ValuePool;
  friend class ValueId;
  explicit Value(ValueSlot* slot) : slot_(slot) {}
  ValueSlot* slot_ = nullptr;
};

// The identity of a Value without its memory: where gradients are delivered after the tensor itself is
// gone. Shape and dtype stay readable.
class ValueId {
 public:
  ValueId() = default;
  ValueId(const Value& value);  // NOLINT
  ValueId(const ValueId& other);
  ValueId(ValueId&& other) noexcept : slot_(other.slot_) { other.slot_ = nullptr; }
  ValueId& operator=(ValueId other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~ValueId();
  const Shape& shape() const;
  Dtype dtype() const;

 private:
  friend class ValuePool;
  ValueSlot* slot_ = nullptr;
};

// The two kernels that adding up gradients needs; handed in, since maths lives a floor above.
struct GradientMath {
  void (*add)(Tensor out, ConstTensor a, ConstTensor b, Stream& stream);
  void (*cast)(Tensor out, ConstTensor in, Stream& stream);
};

// Makes Values and adds up their gradients.
//
// [Note: fan-out] A Value used k times receives k gradients, in reverse order of use. One is taken as it
// is; two are added in fp32 and rounded once to the Value's dtype; from three on the partial sum is kept
// in fp32 and rounded when the last one arrived, so that rounding never depends on who came first.
class ValuePool {
 public:
  ValuePool(Memory& memory, Stream& stream, GradientMath math);
  ~ValuePool();
  ValuePool(const ValuePool&) = delete;
  ValuePool& operator=(const ValuePool&) = delete;

  Value make(Dtype dtype, const Shape& shape, const char* label);
  Value wrap(const ConstTensor& tensor);   // memory owned elsewhere; never differentiated
  Value alias(const Value& value);         // the same memory under a second identity

  void count_use(const ValueId& value);
  void add_gradient(const ValueId& value, Value gradient);
  // The complete gradient, in the Value's dtype; empty if none arrived. Forgets it.
  Value take_gradient(const ValueId& value);
  // Moves what arrived for `from` over to `to` (a recomputed Value), uses included.
  void move_gradient(const ValueId& from, const ValueId& to);

  int64_t live() const { return live_; }

 private:
  friend class Value;
  friend class ValueId;
  ValueSlot* take_slot();
  void recycle(ValueSlot* slot);

  Memory& memory_;
  Stream& stream_;
  GradientMath math_;
  std::deque<ValueSlot> slots_;      // stable addresses
  std::vector<ValueSlot*> free_;
  int64_t live_ = 0;
};

// A short list without heap memory.
template <typename T>
class FixedList {
 public:
  static constexpr int kMax = 4;
  void push(T item) {
    SHARDRUN_CHECK(count_ < kMax, "more than {} items", kMax);
    items_[count_++] = std::move(item);
  }
  int size() const { return count_; }
  const T& operator[](int i) const { return items_[i]; }
  const T* begin() const { return items_.data(); }
  const T* end() const { return items_.data() + count_; }
  void clear() {
    while (count_ > 0) items_[--count_] = T();
  }

 private:
  std::array<T, kMax> items_;
  int count_ = 0;
};

using ValueIds = FixedList<ValueId>;

// The few Values that an op or a unit returns; converts to the single one.
class Values : public FixedList<Value> {
 public:
  Values() = default;
  Values(Value value) { push(std::move(value)); }  // NOLINT
  Values(std::initializer_list<Value> values) {
    for (const Value& value : values) push(value);
  }
  operator Value() const {  // NOLINT
    SHARDRUN_CHECK(size() == 1, "one Value expected, {} returned", size());
    return (*this)[0];
  }
};

}  // namespace shardrun
