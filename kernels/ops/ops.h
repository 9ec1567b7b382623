// Differentiable ops: what a unit's forward is made of. Each runs its kernel, records what backward needs,
// and returns fresh Values in the activations' dtype. Shapes and formulas: the kernels' headers.
#pragma once

#include "runtime/unit.h"

namespace shardrun::ops {

// y [B, T, C] from tokens int32 [B, T], table [V, C], positions [>= T, C] (may be empty).
Value embedding(UnitCall& call, const Value& tokens, ParameterRef table, ParameterRef positions);

// Over the last dimension; bias may be empty. eps 1e-5 as in GPT-2.
Value layer_norm(UnitCall& call, const Value& x, ParameterRef weight, ParameterRef bias);

// y [..., N] = x [..., K] weight^T + bias, weight [N, K]; bias [N] may be empty. With x in the
// activations' dtype the weight must be, too.
Value linear(UnitCall& call, const Value& x, ParameterRef weight, ParameterRef bias);

Value gelu(UnitCall& call, const Value& x);
Value add(UnitCall& call, const Value& a, const Value& b);

// x itself when not training or p is 0.
Value dropout(UnitCall& call, const Value& x, float p);

// y [B, T, C] from qkv [B, T, 3C]; dropout on the probabilities, in training only.
Value attention(UnitCall& call, const Value& qkv, int64_t heads, bool causal, float p);

// {loss sum fp32 [1], valid int64 [1]} from logits [..., Vp] and targets int32 [...]. A loss: backward
// starts here.
Values cross_entropy(UnitCall& call, const Value& logits, const Value& targets, int64_t vocabulary);

}  // namespace shardrun::ops
