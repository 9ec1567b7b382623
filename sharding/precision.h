// What `--precision` means for storage: which dtype computes, whether an fp32 master stands behind it.
#pragma once

#include <string>
#include <vector>

#include "runtime/dtype.h"

namespace shardrun {

enum class Precision : uint8_t { fp32, bf16, fp16, bf16_true };

const char* name_of(Precision precision);
Precision precision_from_name(const std::string& name);  // canonical names; UsageError lists them

// The dtype of gathered parameters and activations.
constexpr Dtype compute_dtype(Precision precision) {
  switch (precision) {
    case Precision::fp32:
      return Dtype::fp32;
    case Precision::fp16:
      return Dtype::fp16;
    default:
      return Dtype::bf16;
  }
}

// bf16-true keeps no master: the bf16 parameter is the truth, updated with stochastic rounding.
constexpr bool has_master(Precision precision) { return precision != Precision::bf16_true; }

// `*` stands for any run of characters. Names that match stay fp32 under every precision.
bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

}  // namespace shardrun
