// The tape of one unit call: which ops ran, on what, and what their backward needs.
//
// An op records itself with an `Op` (a literal that outlives the run). Its backward reads what was saved
// and gives gradients to inputs and parameters. A parameter is recorded as a reference (unit, index), never
// as memory: the gathered buffer may be gone by then and come back elsewhere.
#pragma once

#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "runtime/value.h"

namespace shardrun {

class Unit;
class BackwardCall;

struct ParameterRef {
  const Unit* unit = nullptr;
  int index = 0;
  explicit operator bool() const { return unit != nullptr; }
};

// fp32, the parameter's (padded) shape. The first use in a leaf overwrites, later ones add.
struct GradientTarget {
  Tensor tensor;
  bool accumulate = false;
};

// Where parameters and their leaf gradients are while a unit runs.
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;
  virtual ConstTensor parameter(ParameterRef ref) = 0;      // gathered, in the compute dtype
  virtual GradientTarget gradient(ParameterRef ref) = 0;    // marks the parameter as touched
};

struct Op {
  const char* name;
  void (*backward)(BackwardCall& call);
  // True for a loss: backward starts here from the scalar seed, not from output gradients.
  bool is_loss = false;
};

struct Node {
  static constexpr int kMaxParameters = 3;
  static constexpr size_t kMaxAttributes = 96;
  const Op* op = nullptr;
  ValueIds inputs, outputs;  // for their gradients
  Values saved;              // for their contents
  std::array<ParameterRef, kMaxParameters> parameters;
  alignas(16) std::array<std::byte, kMaxAttributes> attributes;
};

class Tape {
 public:
  void record(const Op& op, ValuePool& pool, std::initializer_list<Value> inputs, const Values& outputs,
              std::initializer_list<Value> saved, std::initializer_list<ParameterRef> parameters) {
    record_node(op, pool, inputs, outputs, saved, parameters);
  }
  template <typename Attributes>
  void record(const Op& op, ValuePool& pool, std::initializer_list<Value> inputs, const Values& outputs,
              std::initializer_list<Value> saved, std::initializer_list<ParameterRef> parameters,
              const Attributes& attributes) {
    static_assert(std::is_trivially_copyable_v<Attributes> &&
                  sizeof(Attributes) <= Node::kMaxAttributes);
    Node& node = record_node(op, pool, inputs, outputs, saved, parameters);
    std::memcpy(node.attributes.data(), &attributes, sizeof(attributes));
  }

  // Runs all recorded ops backwards, emptying the tape on the way.
  void backward(ValuePool& pool, ParameterStore& parameters, Stream& stream, float seed);
  void clear();
  int size() const { return count_; }

 private:
  Node& record_node(const Op& op, ValuePool& pool, std::initializer_list<Value> inputs,
                    const Values& outputs, std::initializer_list<Value> saved,
                    std::initializer_list<ParameterRef> parameters);
  std::vector<Node> nodes_;  // never shrinks: a step after the second allocates nothing
  int count_ = 0;
};

// What an op's backward sees.
class BackwardCall {
 public:
  BackwardCall(Node& node, ValuePool& pool, ParameterStore& parameters, Stream& stream, float seed)
      : node_(node), pool_(pool), parameters_(parameters), stream_(stream), seed_(seed) {}

  Stream& stream() const { return stream_; }
  float seed() const { return seed_; }  // losses: loss scale / leaf_nominal
  const ValueId& input(int i) const { return node_.inputs[i]; }  // shape and dtype only
  const Value& saved(int i) const { return node_.saved[i]; }
  // Empty for an output that got none (an op runs when at least one output got one).
  const Value& output_gradient(int i = 0) const { return output_gradients_[i]; }
  ConstTensor parameter(int i) const;              // absent if the op was given none
  bool has_parameter(int i) const { return static_cast<bool>(node_.parameters[i]); }
  GradientTarget parameter_gradient(int i) const;  // likewise
  template <typename Attributes>
  Attributes attributes() const {
    Attributes attributes;
    std::memcpy(&attributes, node_.attributes.data(), sizeof(attributes));
    return attributes;
  }

  // A fresh tensor of input i's shape and dtype, for its gradient.
  Value make_like_input(int i) const;
  Value make(Dtype dtype, const Shape& shape, const char* label) const;
  // Hands over the gradient of input i. The same gradient may be given to several inputs: nobody
  // writes into it.
  void give(int i, Value gradient);

 private:
  friend class Tape;
  Node& node_;
  ValuePool& pool_;
  ParameterStore& parameters_;
  Stream& stream_;
  float seed_;
  Values output_gradients_;
};

}  // namespace shardrun
