// Operands of one call where its stream computes: the Arrays themselves on the CPU, copies of them in
// a GPU's memory, each in an allocation of its own and as far off an aligned address.
#pragma once

#include <initializer_list>
#include <vector>

#include "runtime/device.h"
#include "tests/kernels/reference.h"

namespace shardrun {

class Operands {
 public:
  explicit Operands(Stream& stream) : stream_(stream) {}
  ~Operands() {
    for (const Copy& copy : copies_) stream_.device()->free(copy.data);
  }
  Operands(const Operands&) = delete;

  Stream& stream() { return stream_; }

  // Null: an argument that is absent. Arrays live as long as this does.
  ConstTensor in(const Array& a) { return place(const_cast<Array&>(a), false); }
  ConstTensor in(const Array* a) { return a ? in(*a) : ConstTensor(); }
  Tensor out(Array& a) { return place(a, true); }  // what is in it goes along
  Tensor out(Array* a) { return a ? out(*a) : Tensor(); }

  // Waits, and brings back all that out() gave away.
  std::vector<Array> results(std::initializer_list<Array*> arrays) {
    for (const Copy& copy : copies_) {
      if (!copy.comes_back) continue;
      stream_.device()->copy(copy.array->bytes().data(), copy.data, copy.array->bytes().size(),
                             stream_.handle());
    }
    stream_.synchronize();
    std::vector<Array> out;
    for (const Array* array : arrays) out.push_back(*array);
    return out;
  }

 private:
  struct Copy {
    Array* array;
    void* data;
    bool comes_back;
  };

  Tensor place(Array& a, bool comes_back) {
    if (!stream_.device()) return a.tensor();
    const std::span<std::byte> bytes = a.bytes();
    void* data = stream_.device()->allocate(bytes.size(), "an operand");
    copies_.push_back({&a, data, comes_back});
    stream_.device()->copy(data, bytes.data(), bytes.size(), stream_.handle());
    const auto* start = static_cast<const std::byte*>(a.tensor().data());
    return {static_cast<std::byte*>(data) + (start - bytes.data()), a.dtype(), a.tensor().shape()};
  }

  Stream& stream_;
  std::vector<Copy> copies_;
};

}  // namespace shardrun
