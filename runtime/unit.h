// Where models and sharding meet. A *unit* is what is gathered together, a transformer block for
// instance: it declares parameters and has a forward. A *model* is a list of units and a forward that
// runs them through a *runner*. Neither knows ranks, shards or devices; the runner does the rest:
// gathering, recording, recomputation, backward, hand-off of gradients.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/random.h"
#include "runtime/tape.h"

namespace shardrun {

struct ParameterSpec {
  std::string name;  // unique in the model: "h.0.attn.c_attn.weight"
  Shape shape;       // model space: what counts, checkpoints and hashes see
  // Initial values: normal(init_mean, init_std), constant init_mean when init_std is 0.
  float init_mean = 0;
  float init_std = 0;
  bool trainable = true;
  // > shape[0]: the compute buffer holds this many rows, the surplus is zero and stays zero.
  int64_t padded_rows = 0;

  Shape padded_shape() const;
};

class UnitCall;

class Unit {
 public:
  explicit Unit(std::string path) : path_(std::move(path)) {}
  virtual ~Unit() = default;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& path() const { return path_; }
  int index() const { return index_; }  // place in Model::units()
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }

  virtual Values forward(UnitCall& call, std::span<const Value> inputs) const = 0;

 protected:
  // Declares a parameter and returns its index, for UnitCall::parameter().
  int declare(ParameterSpec spec);

 private:
  friend class Model;
  std::string path_;
  int index_ = -1;
  std::vector<ParameterSpec> parameters_;
};

// tokens and targets: int32 [B, T]; targets of kernels::kIgnoreTarget do not count.
struct Batch {
  Value tokens;
  Value targets;
};

struct Loss {
  Value sum;    // fp32 [1]: sum over valid items
  Value valid;  // int64 [1]: how many
};

class UnitRunner;

class Model {
 public:
  virtual ~Model() = default;
  const std::vector<const Unit*>& units() const { return units_; }
  int64_t parameter_count() const;  // elements in model space

  virtual Loss forward(UnitRunner& run, const Batch& batch) const = 0;
  // Logits [B, T, Vp] in the activations' dtype; columns past vocabulary() are padding.
  virtual Value predict(UnitRunner& run, const Value& tokens) const = 0;
  virtual int64_t vocabulary() const = 0;

 protected:
  void add(Unit& unit);

 private:
  std::vector<const Unit*> units_;
};

// What an op sees while a unit runs forward.
class UnitCall : public ParameterStore {
 public:
  UnitCall(const Unit& unit, int use, UnitRunner& runner, Tape* tape)
      : unit_(unit), runner_(runner), tape_(tape), use_(use) {}

  Stream& stream() const;
  bool training() const;               // dropout on
  Tape* tape() const { return tape_; }  // null: nothing is recorded
  ValuePool& pool() const;
  Dtype activation_dtype() const;
  Value make(Dtype dtype, const Shape& shape, const char* label) const;

  ParameterRef parameter(int index) const { return {&unit_, index}; }
  ConstTensor parameter(ParameterRef ref) override;
  GradientTarget gradient(ParameterRef ref) override;

  // The key of this op's draws in this leaf. Ops are numbered as they ask, so a recomputed forward
  // draws the same.
  RandomKey next_random_key();

  template <typename... Attributes>
  void record(const Op& op, std::initializer_list<Value> inputs, const Values& outputs,
              std::initializer_list<Value> saved, std::initializer_list<ParameterRef> parameters,
              const Attributes&... attributes) {
    if (tape_) tape_->record(op, pool(), inputs, outputs, saved, parameters, attributes...);
  }

 private:
  const Unit& unit_;
  UnitRunner& runner_;
  Tape* tape_;
  int use_;
  uint64_t ordinal_ = 0;
};

}  // namespace shardrun
