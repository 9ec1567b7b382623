#include "runtime/tape.h"

namespace shardrun {

Node& Tape::record_node(const Op& op, ValuePool& pool, std::initializer_list<Value> inputs,
                        const Values& outputs, std::initializer_list<Value> saved,
                        std::initializer_list<ParameterRef> parameters) {
  SHARDRUN_CHECK(parameters.size() <= Node::kMaxParameters, "{}: too many parameters", op.name);
  if (count_ == static_cast<int>(nodes_.size())) nodes_.emplace_back();
  Node& node = nodes_[count_++];
  node.op = &op;
  for (const Value& value : inputs) {
    node.inputs.push(value);
    pool.count_use(value);
  }
  for (const Value& value : outputs) node.outputs.push(value);
  for (const Value& value : saved) node.saved.push(value);
  node.parameters = {};
  int i = 0;
  for (ParameterRef ref : parameters) node.parameters[i++] = ref;
  return node;
}

static void clear_node(Node& node) {
  node.inputs.clear();
  node.outputs.clear();
  node.saved.clear();
}

void Tape::clear() {
  while (count_ > 0) clear_node(nodes_[--count_]);
}

void Tape::backward(ValuePool& pool, ParameterStore& parameters, Stream& stream, float seed) {
  while (count_ > 0) {
    Node& node = nodes_[count_ - 1];
    {
      BackwardCall call(node, pool, parameters, stream, seed);
      bool reached = node.op->is_loss;
      for (const ValueId& output : node.outputs) {
        Value gradient = pool.take_gradient(output);
        reached = reached || static_cast<bool>(gradient);
        call.output_gradients_.push(std::move(gradient));
      }
      if (reached) node.op->backward(call);
    }
    clear_node(node);
    --count_;
  }
}

ConstTensor BackwardCall::parameter(int i) const {
  return has_parameter(i) ? parameters_.parameter(node_.parameters[i]) : ConstTensor();
}

GradientTarget BackwardCall::parameter_gradient(int i) const {
  return has_parameter(i) ? parameters_.gradient(node_.parameters[i]) : GradientTarget();
}

Value BackwardCall::make_like_input(int i) const {
  return pool_.make(input(i).dtype(), input(i).shape(), "gradient");
}

Value BackwardCall::make(Dtype dtype, const Shape& shape, const char* label) const {
  return pool_.make(dtype, shape, label);
}

void BackwardCall::give(int i, Value gradient) { pool_.add_gradient(input(i), std::move(gradient)); }

}  // namespace shardrun
