// A small model whose sizes fit nothing: odd and prime widths, parameters of one element, rows of
// padding, a unit without parameters, parameters that no leaf uses, a table used by two units.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/ops.h"
#include "runtime/unit_runner.h"

namespace shardrun::test {

struct OddSizes {
  int64_t vocabulary = 7;
  int64_t padded = 0;  // rows of the table in memory beyond the vocabulary
  int64_t channels = 5;
  int64_t context = 3;
  std::vector<int64_t> hidden;  // a unit each; 0: one without parameters
  int64_t unused = 0;           // elements of a parameter without use
};

class OddModel : public Model {
 public:
  explicit OddModel(const OddSizes& sizes) : sizes_(sizes) {
    first_ = std::make_unique<First>(sizes);
    add(*first_);
    for (size_t i = 0; i < sizes.hidden.size(); ++i) {
      middle_.push_back(std::make_unique<Middle>(sizes, i));
      add(*middle_.back());
    }
    last_ = std::make_unique<Last>(sizes, *first_);
    add(*last_);
  }

  Loss forward(UnitRunner& run, const Batch& batch) const override {
    Value x = run(*first_, {batch.tokens});
    for (const auto& unit : middle_) x = run(*unit, {x});
    const Values loss = run(*last_, {x, batch.targets}, {first_.get()});
    return {loss[0], loss[1]};
  }
  Value predict(UnitRunner&, const Value&) const override { return {}; }
  int64_t vocabulary() const override { return sizes_.vocabulary; }

 private:
  struct First : Unit {
    explicit First(const OddSizes& s) : Unit("first") {
      table = declare({.name = "table",
                       .shape = {s.vocabulary, s.channels},
                       .init_std = 0.5f,
                       .padded_rows = s.padded > 0 ? s.vocabulary + s.padded : 0});
      positions = declare(
          {.name = "positions", .shape = {s.context, s.channels}, .init_std = 0.5f});
    }
    Values forward(UnitCall& call, std::span<const Value> in) const override {
      return ops::embedding(call, in[0], call.parameter(table), call.parameter(positions));
    }
    int table, positions;
  };

  struct Middle : Unit {
    Middle(const OddSizes& s, size_t i) : Unit(fmt::format("middle.{}", i)) {
      const int64_t h = s.hidden[i];
      if (h == 0) return;
      norm = declare({.name = path() + ".ln_1.weight", .shape = {s.channels}, .init_mean = 1});
      up = declare({.name = path() + ".up", .shape = {h, s.channels}, .init_std = 0.4f});
      up_bias = declare({.name = path() + ".up_bias", .shape = {h}});
      down = declare({.name = path() + ".down", .shape = {s.channels, h}, .init_std = 0.4f});
    }
    Values forward(UnitCall& call, std::span<const Value> in) const override {
      if (up < 0) return ops::gelu(call, in[0]);
      Value x = ops::layer_norm(call, in[0], call.parameter(norm), {});
      x = ops::gelu(call, ops::linear(call, x, call.parameter(up), call.parameter(up_bias)));
      x = ops::dropout(call, ops::linear(call, x, call.parameter(down), {}), 0.2f);
      return ops::add(call, in[0], x);
    }
    int norm = -1, up = -1, up_bias = -1, down = -1;
  };

  struct Last : Unit {
    Last(const OddSizes& s, const First& first)
        : Unit("last"), first(first), vocabulary(s.vocabulary) {
      if (s.unused > 0) declare({.name = "unused", .shape = {s.unused}, .init_mean = 3});
      weight = declare({.name = "last.weight", .shape = {s.channels}, .init_mean = 1});
      bias = declare({.name = "last.bias", .shape = {s.channels}});
    }
    Values forward(UnitCall& call, std::span<const Value> in) const override {
      const Value x = ops::layer_norm(call, in[0], call.parameter(weight), call.parameter(bias));
      const Value logits = ops::linear(call, x, {&first, first.table}, {});
      return ops::cross_entropy(call, logits, in[1], vocabulary);
    }
    const First& first;
    int64_t vocabulary;
    int weight, bias;
  };

  OddSizes sizes_;
  std::unique_ptr<First> first_;
  std::vector<std::unique_ptr<Middle>> middle_;
  std::unique_ptr<Last> last_;
};

}  // namespace shardrun::test
