#include "kernels/ops/ops.h"

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"

namespace shardrun::ops {
namespace {

using kernels::Transpose;

Shape with_columns(const Shape& shape, int64_t columns) {
  Shape out;
  for (int i = 0; i + 1 < shape.rank(); ++i) out.append(shape[i]);
  out.append(columns);
  return out;
}

// ---- embedding

void embedding_backward(BackwardCall& call) {
  const GradientTarget table = call.parameter_gradient(0);
  kernels::embedding_backward(table.tensor, call.saved(0), call.output_gradient(), table.accumulate,
                              call.stream());
  if (!call.has_parameter(1)) return;
  const GradientTarget positions = call.parameter_gradient(1);
  kernels::position_backward(positions.tensor, call.output_gradient(), positions.accumulate,
                             call.stream());
}
constexpr Op kEmbedding{"embedding", embedding_backward};

// ---- layer norm

void layer_norm_backward(BackwardCall& call) {
  Value dx = call.make_like_input(0);
  const GradientTarget weight = call.parameter_gradient(0);
  const GradientTarget bias = call.parameter_gradient(1);
  kernels::layer_norm_backward(dx, weight.tensor, bias.tensor, call.output_gradient(),
                               call.saved(0), call.parameter(0), call.saved(1), call.saved(2),
                               weight.accumulate, bias.accumulate, call.stream());
  call.give(0, std::move(dx));
}
constexpr Op kLayerNorm{"layer_norm", layer_norm_backward};

// ---- linear

void linear_backward(BackwardCall& call) {
  const Value& dy = call.output_gradient();
  if (call.has_parameter(1)) {
    const GradientTarget bias = call.parameter_gradient(1);
    kernels::column_sum(bias.tensor, dy, bias.accumulate, call.stream());
  }
  const GradientTarget weight = call.parameter_gradient(0);
  kernels::matmul(weight.tensor, dy, Transpose::yes, call.saved(0), Transpose::no, {},
                  weight.accumulate, call.stream());
  Value dx = call.make_like_input(0);
  kernels::matmul(dx, dy, Transpose::no, call.parameter(0), Transpose::no, {}, false,
                  call.stream());
  call.give(0, std::move(dx));
}
constexpr Op kLinear{"linear", linear_backward};

// ---- elementwise

void gelu_backward(BackwardCall& call) {
  Value dx = call.make_like_input(0);
  kernels::gelu_backward(dx, call.output_gradient(), call.saved(0), call.stream());
  call.give(0, std::move(dx));
}
constexpr Op kGelu{"gelu", gelu_backward};

void add_backward(BackwardCall& call) {
  call.give(0, call.output_gradient());
  call.give(1, call.output_gradient());
}
constexpr Op kAdd{"add", add_backward};

struct DropoutAttributes {
  float p;
  RandomKey key;
};

void dropout_backward(BackwardCall& call) {
  const auto attributes = call.attributes<DropoutAttributes>();
  Value dx = call.make_like_input(0);
  kernels::dropout(dx, call.output_gradient(), attributes.p, attributes.key, call.stream());
  call.give(0, std::move(dx));
}
constexpr Op kDropout{"dropout", dropout_backward};

// ---- attention

void attention_backward(BackwardCall& call) {
  Value dqkv = call.make_like_input(0);
  kernels::attention_backward(dqkv, call.output_gradient(), call.saved(1), call.saved(0),
                              call.saved(2), call.attributes<kernels::AttentionOptions>(),
                              call.stream());
  call.give(0, std::move(dqkv));
}
constexpr Op kAttention{"attention", attention_backward};

// ---- cross entropy

void cross_entropy_backward(BackwardCall& call) {
  Value dlogits = call.make_like_input(0);
  kernels::cross_entropy_backward(dlogits, call.saved(0), call.saved(2), call.saved(1),
                                  call.attributes<int64_t>(), call.seed(), call.stream());
  call.give(0, std::move(dlogits));
}
constexpr Op kCrossEntropy{"cross_entropy", cross_entropy_backward, true};

}  // namespace

Value embedding(UnitCall& call, const Value& tokens, ParameterRef table, ParameterRef positions) {
  const ConstTensor rows = call.parameter(table);
  Shape shape = tokens.shape();
  shape.append(rows.shape().columns());
  Value y = call.make(call.activation_dtype(), shape, "embedding");
  kernels::embedding_forward(y, tokens, rows, call.parameter(positions), call.stream());
  call.record(kEmbedding, {}, {y}, {tokens}, {table, positions});
  return y;
}

Value layer_norm(UnitCall& call, const Value& x, ParameterRef weight, ParameterRef bias) {
  const Shape rows{x.shape().rows()};
  Value y = call.make(x.dtype(), x.shape(), "layer norm");
  Value mean = call.make(Dtype::fp32, rows, "norm mean");
  Value rstd = call.make(Dtype::fp32, rows, "norm rstd");
  kernels::layer_norm_forward(y, mean, rstd, x, call.parameter(weight), call.parameter(bias), 1e-5f,
                              call.stream());
  call.record(kLayerNorm, {x}, {y}, {x, mean, rstd}, {weight, bias});
  return y;
}

Value linear(UnitCall& call, const Value& x, ParameterRef weight, ParameterRef bias) {
  const ConstTensor w = call.parameter(weight);
  Value y = call.make(x.dtype(), with_columns(x.shape(), w.shape()[0]), "linear");
  kernels::matmul(y, x, Transpose::no, w, Transpose::yes, call.parameter(bias), false,
                  call.stream());
  call.record(kLinear, {x}, {y}, {x}, {weight, bias});
  return y;
}

Value gelu(UnitCall& call, const Value& x) {
  Value y = call.make(x.dtype(), x.shape(), "gelu");
  kernels::gelu_forward(y, x, call.stream());
  call.record(kGelu, {x}, {y}, {x}, {});
  return y;
}

Value add(UnitCall& call, const Value& a, const Value& b) {
  Value y = call.make(a.dtype(), a.shape(), "add");
  kernels::add(y, a, b, call.stream());
  call.record(kAdd, {a, b}, {y}, {}, {});
  return y;
}

Value dropout(UnitCall& call, const Value& x, float p) {
  if (!call.training() || p == 0) return x;
  const DropoutAttributes attributes{p, call.next_random_key()};
  Value y = call.make(x.dtype(), x.shape(), "dropout");
  kernels::dropout(y, x, p, attributes.key, call.stream());
  call.record(kDropout, {x}, {y}, {}, {}, attributes);
  return y;
}

Value attention(UnitCall& call, const Value& qkv, int64_t heads, bool causal, float p) {
  kernels::AttentionOptions options{.heads = heads, .causal = causal, .dropout = 0, .key = {}};
  if (call.training() && p > 0) {
    options.dropout = p;
    options.key = call.next_random_key();
  }
  const int64_t batch = qkv.shape()[0], time = qkv.shape()[1];
  Value y = call.make(qkv.dtype(), with_columns(qkv.shape(), qkv.shape().columns() / 3), "attention");
  Value lse = call.make(Dtype::fp32, Shape{batch, heads, time}, "attention lse");
  kernels::attention_forward(y, lse, qkv, options, call.stream());
  call.record(kAttention, {qkv}, {y}, {qkv, y, lse}, {}, options);
  return y;
}

Values cross_entropy(UnitCall& call, const Value& logits, const Value& targets, int64_t vocabulary) {
  const int64_t rows = logits.shape().rows();
  Value sum = call.make(Dtype::fp32, Shape{1}, "loss sum");
  Value valid = call.make(Dtype::int64, Shape{1}, "valid count");
  Value lse = call.make(Dtype::fp32, Shape{rows}, "logits lse");
  kernels::cross_entropy_forward(sum, valid, lse,
                                 logits.tensor().reshaped(Shape{rows, logits.shape().columns()}),
                                 targets.tensor().reshaped(Shape{rows}), vocabulary, call.stream());
  call.record(kCrossEntropy, {logits}, {sum, valid}, {logits, targets, lse}, {}, vocabulary);
  return {sum, valid};
}

}  // namespace shardrun::ops
