#include "runtime/tensor.h"

namespace shardrun {

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t dim : dims) append(dim);
}

void Shape::append(int64_t dim) {
  SHARDRUN_CHECK(rank_ < kMaxRank, "shape has more than {} dimensions", kMaxRank);
  SHARDRUN_CHECK(dim >= 0, "dimension {} is negative", dim);
  dims_[rank_++] = dim;
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dims_[i];
  return n;
}

int64_t Shape::rows() const {
  int64_t n = 1;
  for (int i = 0; i + 1 < rank_; ++i) n *= dims_[i];
  return n;
}

std::string Shape::text() const {
  std::string out = "[";
  for (int i = 0; i < rank_; ++i) out += fmt::format("{}{}", i ? ", " : "", dims_[i]);
  return out + "]";
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i) {
    if (dims_[i] != other.dims_[i]) return false;
  }
  return true;
}

static const void* advance(const void* data, int64_t elements, Dtype dtype) {
  if (data == nullptr) return nullptr;  // meta
  return static_cast<const std::byte*>(data) + elements * static_cast<int64_t>(size_of(dtype));
}

ConstTensor ConstTensor::flat(int64_t begin, int64_t count) const {
  SHARDRUN_CHECK(begin >= 0 && count >= 0 && begin + count <= numel(),
                 "range [{}, {}) of a tensor of {} elements", begin, begin + count, numel());
  return {advance(data_, begin, dtype_), dtype_, Shape{count}};
}

ConstTensor ConstTensor::reshaped(const Shape& shape) const {
  SHARDRUN_CHECK(shape.numel() == numel(), "{} reshaped to {}", shape_.text(), shape.text());
  return {data_, dtype_, shape};
}

Tensor Tensor::flat(int64_t begin, int64_t count) const {
  ConstTensor view = ConstTensor::flat(begin, count);
  return {const_cast<void*>(view.data()), view.dtype(), view.shape()};
}

Tensor Tensor::reshaped(const Shape& shape) const {
  ConstTensor view = ConstTensor::reshaped(shape);
  return {const_cast<void*>(view.data()), view.dtype(), view.shape()};
}

}  // namespace shardrun
