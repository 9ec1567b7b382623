// Tensors are views: a pointer, a dtype and a shape, dense and row-major. They own nothing; a
// Buffer (runtime/memory.h) does. `Tensor` may be written through, `ConstTensor` may not. On the
// device kind `meta` the pointer is null and nobody looks at it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "runtime/dtype.h"
#include "runtime/error.h"

namespace shardrun {

class Shape {
 public:
  static constexpr int kMaxRank = 5;

  Shape() = default;  // rank 0: one element
  Shape(std::initializer_list<int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i < 0 ? rank_ + i : i]; }  // -1 is the last
  int64_t numel() const;
  int64_t rows() const;  // product of all dimensions but the last; 1 for rank 0
  int64_t columns() const { return rank_ == 0 ? 1 : dims_[rank_ - 1]; }
  void append(int64_t dim);
  std::string text() const;  // "[2, 64, 128]"
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

class ConstTensor {
 public:
  ConstTensor() = default;  // absent: an optional argument that was not given
  ConstTensor(const void* data, Dtype dtype, const Shape& shape)
      : data_(data), dtype_(dtype), shape_(shape), present_(true) {}

  bool present() const { return present_; }
  explicit operator bool() const { return present_; }
  const void* data() const { return data_; }
  Dtype dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t numel() const { return present_ ? shape_.numel() : 0; }
  size_t bytes() const { return static_cast<size_t>(numel()) * size_of(dtype_); }

  template <typename T>
  const T* as() const {
    SHARDRUN_CHECK(dtype_of<T> == dtype_, "tensor is {}, read as {}", name_of(dtype_),
                   name_of(dtype_of<T>));
    return static_cast<const T*>(data_);
  }

  // Elements [begin, begin + count) as a flat tensor.
  ConstTensor flat(int64_t begin, int64_t count) const;
  ConstTensor reshaped(const Shape& shape) const;

 protected:
  const void* data_ = nullptr;
  Dtype dtype_ = Dtype::fp32;
  Shape shape_;
  bool present_ = false;
};

class Tensor : public ConstTensor {
 public:
  Tensor() = default;
  Tensor(void* data, Dtype dtype, const Shape& shape) : ConstTensor(data, dtype, shape) {}

  void* data() const { return const_cast<void*>(data_); }
  template <typename T>
  T* as() const {
    return const_cast<T*>(ConstTensor::as<T>());
  }
  Tensor flat(int64_t begin, int64_t count) const;
  Tensor reshaped(const Shape& shape) const;
};

}  // namespace shardrun
