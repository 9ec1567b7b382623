// Host arrays of any dtype with their values in double, for tests against a double reference.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kernels/math/convert.h"
#include "runtime/tensor.h"

namespace shardrun {

inline double get(const void* data, Dtype dtype, int64_t i) {
  if (dtype == Dtype::bf16) return math::widen(static_cast<const Bf16*>(data)[i]);
  if (dtype == Dtype::fp16) return math::widen(static_cast<const Fp16*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

inline void set(void* data, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::bf16) return math::narrow(x, static_cast<Bf16*>(data)[i]);
  if (dtype == Dtype::fp16) return math::narrow(x, static_cast<Fp16*>(data)[i]);
  static_cast<float*>(data)[i] = x;
}

// Largest relative error of one rounding.
inline double unit_roundoff(Dtype dtype) {
  return dtype == Dtype::bf16 ? 0x1p-8 : dtype == Dtype::fp16 ? 0x1p-11 : 0x1p-24;
}

// A tensor that owns its memory. Shifted by `offset` elements from an aligned start.
class Array {
 public:
  Array(Dtype dtype, const Shape& shape, int64_t offset = 0)
      : dtype_(dtype),
        shape_(shape),
        offset_(offset),
        bytes_(static_cast<size_t>(shape.numel() + offset) * size_of(dtype) + 64) {}

  static Array normal(Dtype dtype, const Shape& shape, uint32_t seed, float scale = 1) {
    Array out(dtype, shape);
    std::mt19937 engine(seed);
    std::normal_distribution<float> draw;
    for (int64_t i = 0; i < shape.numel(); ++i) out.set(i, scale * draw(engine));
    return out;
  }

  Tensor tensor() {
    return {bytes_.data() + static_cast<size_t>(offset_) * size_of(dtype_), dtype_, shape_};
  }
  ConstTensor tensor() const { return const_cast<Array*>(this)->tensor(); }
  double operator[](int64_t i) const { return get(tensor().data(), dtype_, i); }
  void set(int64_t i, float x) { shardrun::set(tensor().data(), dtype_, i, x); }
  std::span<std::byte> bytes() { return bytes_; }  // with what is before and behind
  int64_t numel() const { return shape_.numel(); }
  Dtype dtype() const { return dtype_; }
  bool same_bits(const Array& other) const { return bytes_ == other.bytes_; }

 private:
  Dtype dtype_;
  Shape shape_;
  int64_t offset_;
  std::vector<std::byte> bytes_;
};

}  // namespace shardrun
