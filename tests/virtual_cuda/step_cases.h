// Small steps on four virtual GPUs, which the tests of the staged transport and of NCCL share.
#pragma once

#include <memory>

#include "tests/sharding/odd_model.h"
#include "tests/sharding/step_fixture.h"

namespace shardrun::test {

// A model whose units have few, no and unused parameters.
inline StepCase odd_case(Precision precision, Dtype wire, const char* scaler) {
  StepCase c;
  c.gpt.context = 4;
  c.gpt.vocabulary = 13;
  c.make_model = [] {
    return std::make_unique<OddModel>(OddSizes{.vocabulary = 13,
                                               .padded = 3,
                                               .channels = 24,
                                               .context = 4,
                                               .hidden = {40, 0, 9},
                                               .unused = 5});
  };
  c.precision = precision;
  c.wire = wire;
  c.scaler = scaler;
  c.leaves = 5;
  c.steps = 2;
  c.gpus = 4;
  return c;
}

// With attention, dropout and tied weights.
inline StepCase gpt_case(Precision precision, Dtype wire, const char* scaler) {
  StepCase c = odd_case(precision, wire, scaler);
  c.make_model = nullptr;
  c.gpt = tiny_gpt();
  c.gpt.layers = 1;
  c.gpt.context = 8;
  c.leaves = 3;
  return c;
}

}  // namespace shardrun::test
