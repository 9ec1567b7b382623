#include "sharding/sharded_runner.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/ops/gradient_math.h"
#include "kernels/reduce.h"
#include "runtime/range.h"

namespace shardrun {

ShardedRunner::ShardedRunner(const Model& model, ShardState& state, const LeafPlan& leaves,
                             Communicator& comm, Memory& memory, const Lanes& lanes,
                             RunnerOptions options, Prefetch prefetch)
    : UnitRunner(model, memory, lanes.compute, gradient_math(), options),
      state_(state),
      leaves_(leaves),
      comm_(comm),
      memory_(memory),
      lanes_(lanes),
      prefetch_(std::move(prefetch)),
      lent_(memory, 64),
      lives_(model.units().size()) {
  for (size_t u = 0; u < lives_.size(); ++u) {
    const UnitPlan& plan = state.plan().units()[u];
    lives_[u].gathered.resize(plan.segments.size());
    lives_[u].gradients.resize(plan.segments.size());
    lives_[u].touched.assign(plan.places.size(), 0);
    lives_[u].first_place = places_;
    places_ += static_cast<int>(plan.segments.size());
  }
  const bool by_step = state.plan().options().reduce_every == ReduceEvery::step;
  const int64_t places = by_step ? 2 * places_ : places_;
  found_ = allocate_tensor(memory, Dtype::int64, Shape{places}, "overflow places");
  for (HostBuffer* host : {&found_on_host_, &nothing_found_}) {
    *host = HostBuffer(stream().device(), found_.tensor.bytes(), "overflow places");
    std::fill_n(host->as<int64_t>(), places, kernels::kNothingFound);
  }
  waiting_.reserve(lives_.size());
  lingering_.reserve(lives_.size());
}

void ShardedRunner::begin_step() {
  copy_from_host(found_.tensor, nothing_found_.data(), stream());
}

void ShardedRunner::begin_micro_step(int64_t step, int64_t m) {
  m_ = m;
  leaf_ = leaves_.leaf(m, comm_.rank());
  backward_order_ = 0;
  stream().set_idle(leaf_ < 0);
  if (!prefetch_.training.empty()) order_ = &prefetch_.training;
  begin_leaf({step, std::max<int64_t>(leaf_, 0)}, true);
}

void ShardedRunner::end_micro_step() {
  end_leaf();
  for (const Unit* unit : waiting_) reduce(*unit);
  waiting_.clear();
  settle_reduction();
  stream().set_idle(false);
}

void ShardedRunner::begin_evaluation(int64_t leaf) {
  stream().set_idle(leaf < 0);
  if (!prefetch_.evaluation.empty()) order_ = &prefetch_.evaluation;
  begin_leaf({0, std::max<int64_t>(leaf, 0)}, false);
}

void ShardedRunner::end_leaf() {
  SHARDRUN_CHECK(!order_ || next_ == order_->size(), "a leaf used {} units, planned {}", next_,
                 order_->size());
  order_ = nullptr;
  next_ = 0;
  free_lingering();
}

// ---- parameters

ConstTensor ShardedRunner::parameter(ParameterRef ref) {
  const int u = ref.unit->index();
  const ParameterPlace& place = state_.plan().units()[u].places[ref.index];
  const Tensor& full = state_.units()[u].segments[place.segment].compute_full;
  SHARDRUN_CHECK(full.present(), "{} is read while its unit is not gathered", place.spec->name);
  return full.flat(place.offset, place.padded_numel).reshaped(place.spec->padded_shape());
}

// Units that the calls after this use need, or that this call needs beside it.
std::span<const UnitUse> ShardedRunner::soon() const {
  if (!order_) return {};
  const int last_call = (*order_)[next_ - 1].call + prefetch_.units;
  size_t end = next_;
  while (end < order_->size() && (*order_)[end].call <= last_call) ++end;
  return {order_->data() + next_, end - next_};
}

void ShardedRunner::next_use(const Unit& unit) {
  if (!order_) return;
  SHARDRUN_CHECK(next_ < order_->size() && (*order_)[next_].unit == unit.index(),
                 "use {} of a unit in this leaf is of {}, planned {}", next_, unit.path(),
                 next_ < order_->size() ? model().units()[(*order_)[next_].unit]->path() : "no more");
  ++next_;
}

// [Note: lingering] What was released stays gathered until another unit needs the room or a gradient is
// reduced, and longer when it is needed soon. So the last unit of forward, which is the first of
// backward, is gathered once.
void ShardedRunner::acquire(const Unit& unit) {
  if (state_.plan().options().zero < 3) return;
  next_use(unit);
  UnitLife& life = lives_[unit.index()];
  if (life.acquired++ > 0) return;
  const bool lingered = std::erase(lingering_, &unit) > 0;
  if (lingered && !order_) return;
  free_lingering();
  if (!life.present) gather(unit);
  life.arrival.settle(lanes_);
  for (const UnitUse& use : soon()) {
    if (!lives_[use.unit].present) gather(*model().units()[use.unit]);
  }
}

void ShardedRunner::gather(const Unit& unit) {
  const Range range("gather");
  UnitLife& life = lives_[unit.index()];
  life.present = true;
  UnitState& state = state_.units()[unit.index()];
  const bool travels = comm_.size() > 1 && !state.segments.empty();
  if (travels) life.arrival.begin(lanes_);
  for (size_t s = 0; s < state.segments.size(); ++s) {
    SegmentState& part = state.segments[s];
    if (!travels) {  // the slice is the whole
      part.compute_full = part.compute_slice;
      continue;
    }
    OwnedTensor full =
        allocate_tensor(memory_, part.plan->compute, Shape{part.plan->full}, "gathered parameters");
    comm_.all_gather(full.tensor, part.compute_slice, lanes_.communication);
    part.compute_full = full.tensor;
    life.gathered[s] = std::move(full.buffer);
  }
  if (travels) life.arrival.end(lanes_);
}

void ShardedRunner::release(const Unit& unit) {
  UnitLife& life = lives_[unit.index()];
  if (state_.plan().options().zero < 3 || --life.acquired > 0) return;
  lingering_.push_back(&unit);
}

void ShardedRunner::free_lingering() {
  const auto next = soon();
  const auto is_soon = [&](const Unit* unit) {
    return std::any_of(next.begin(), next.end(),
                       [&](const UnitUse& use) { return use.unit == unit->index(); });
  };
  std::erase_if(lingering_, [&](const Unit* unit) {
    if (is_soon(unit)) return false;
    UnitLife& life = lives_[unit->index()];
    life.present = false;
    for (SegmentState& part : state_.units()[unit->index()].segments) part.compute_full = Tensor();
    for (Buffer& buffer : life.gathered) buffer.reset();
    return true;
  });
}

// ---- gradients

GradientTarget ShardedRunner::gradient(ParameterRef ref) {
  const int u = ref.unit->index();
  UnitLife& life = lives_[u];
  if (!life.has_gradients) begin_gradients(*ref.unit);
  const ParameterPlace& place = state_.plan().units()[u].places[ref.index];
  Tensor whole = life.gradients[place.segment].tensor;
  const bool accumulate = life.touched[ref.index] != 0;
  life.touched[ref.index] = 1;
  return {whole.flat(place.offset, place.padded_numel).reshaped(place.spec->padded_shape()),
          accumulate};
}

void ShardedRunner::begin_gradients(const Unit& unit) {
  UnitLife& life = lives_[unit.index()];
  const UnitPlan& plan = state_.plan().unit(unit);
  for (size_t s = 0; s < plan.segments.size(); ++s) {
    const SegmentPlan& segment = plan.segments[s];
    life.gradients[s] = allocate_tensor(memory_, Dtype::fp32, Shape{segment.full}, "leaf gradient");
    // Padding between parameters and at the end: zero, so that it counts nowhere.
    int64_t end = 0;
    for (int i : segment.places) {
      const ParameterPlace& place = plan.places[i];
      kernels::fill(life.gradients[s].tensor.flat(end, place.offset - end), 0, stream());
      end = place.offset + place.padded_numel;
    }
    kernels::fill(life.gradients[s].tensor.flat(end, segment.full - end), 0, stream());
  }
  std::fill(life.touched.begin(), life.touched.end(), 0);
  life.has_gradients = true;
}

void ShardedRunner::gradients_complete(const Unit& unit) {
  UnitLife& life = lives_[unit.index()];
  if (!life.has_gradients) begin_gradients(unit);
  for (size_t i = 0; i < life.touched.size(); ++i) {  // a parameter that this leaf did not use
    if (life.touched[i]) continue;
    GradientTarget target = gradient({&unit, static_cast<int>(i)});
    kernels::fill(target.tensor, 0, stream());
  }
  if (hook_ && leaf_ >= 0) {
    for (OwnedTensor& gradient : life.gradients) {
      hook_(hook_context_, leaf_, unit, gradient.tensor);
    }
  }
  if (state_.plan().options().zero == 1) {
    waiting_.push_back(&unit);
  } else {
    reduce(unit);
  }
}

// One reduction at a time is under way: this waits for the last.
void ShardedRunner::reduce(const Unit& unit) {
  const Range range("reduce");
  free_lingering();
  settle_reduction();
  UnitLife& life = lives_[unit.index()];
  for (size_t s = 0; s < life.gradients.size(); ++s) {
    reduce_segment(unit, static_cast<int>(s), std::move(life.gradients[s]));
    if (prefetch_.units == 0) settle_reduction();
  }
  life.has_gradients = false;
  life.backward_order = backward_order_++;
}

void ShardedRunner::settle_reduction() {
  reduction_.settle(lanes_);
  lent_.clear();
}

void ShardedRunner::reduce_segment(const Unit& unit, int segment, OwnedTensor gradient) {
  SegmentState& part = state_.units()[unit.index()].segments[segment];
  const ShardOptions& options = state_.plan().options();
  OwnedTensor wire = std::move(gradient);
  // A leaf's gradient is rounded to the wire dtype also at W = 1. Segments kept fp32 travel fp32.
  if (options.wire != Dtype::fp32 && part.plan->compute != Dtype::fp32) {
    OwnedTensor rounded =
        allocate_tensor(memory_, options.wire, wire.tensor.shape(), "wire gradient");
    kernels::cast(rounded.tensor, wire.tensor, stream());
    wire = std::move(rounded);
  }
  if (options.reduce_every == ReduceEvery::step) {
    if (leaf_ < 0) return;
    const auto mode = m_ == 0 ? kernels::FoldMode::assign : kernels::FoldMode::add;
    kernels::fold(part.block_full, wire.tensor, mode, found(unit, segment),
                  kernels::place_tag(leaf_, 0), stream());
    return;
  }
  LeafWindow window;
  window.first = m_ * comm_.size();
  window.count = std::min<int64_t>(comm_.size(), leaves_.leaves - window.first);
  window.total = leaves_.leaves;
  window.sum_block = options.sum_block;
  reduction_.begin(lanes_);
  if (options.reduction == Reduction::native) {
    comm_.native_sum(part.sum.total, found(unit, segment), wire.tensor, window, lent_,
                     lanes_.communication);
  } else {
    comm_.exchange_sum(part.sum, found(unit, segment), wire.tensor, window, lent_,
                       lanes_.communication);
  }
  lent_.keep(std::move(wire.buffer));
  reduction_.end(lanes_);
}

void ShardedRunner::finish_sums() {
  const ShardOptions& options = state_.plan().options();
  if (options.reduce_every == ReduceEvery::step) {
    const int64_t blocks = (leaves_.leaves + leaves_.micro_steps - 1) / leaves_.micro_steps;
    for (auto unit = state_.units().rbegin(); unit != state_.units().rend(); ++unit) {
      for (size_t s = 0; s < unit->segments.size(); ++s) {
        SegmentState& part = unit->segments[s];
        const Tensor place = found(*unit->plan->unit, static_cast<int>(s), true);
        if (options.reduction == Reduction::native) {
          comm_.native_sum(part.sum.total, place, part.block_full, {0, blocks, blocks, 1}, memory_,
                           stream());
          continue;
        }
        comm_.exchange_blocks(part.sum.total, place, part.block_full, blocks, memory_, stream());
      }
    }
  }
  if (options.zero == 0) {
    for (UnitState& unit : state_.units()) {
      for (SegmentState& part : unit.segments) {
        comm_.all_gather(part.sum_full, part.sum.total, stream());
      }
    }
  }
}

// ---- what was not finite

Tensor ShardedRunner::found(const Unit& unit, int segment, bool of_blocks) const {
  const int place = lives_[unit.index()].first_place + segment + (of_blocks ? places_ : 0);
  return found_.tensor.flat(place, 1);
}

void ShardedRunner::fetch_overflow() {
  copy_to_host(found_on_host_.data(), found_.tensor, stream());
}

// In one segment the smallest leaf has the smallest micro-step, for a rank's leaves grow with it, and
// a unit's turn in backward is the same in every leaf: so one place for each segment is enough.
Overflow ShardedRunner::overflow() const {
  Overflow first;
  const auto consider = [&](const UnitState& unit, int segment, bool of_blocks) {
    const UnitLife& life = lives_[unit.plan->unit->index()];
    const int place = life.first_place + segment + (of_blocks ? places_ : 0);
    const kernels::NonFinite bad = kernels::place_of(found_on_host_.as<int64_t>()[place]);
    if (bad.leaf < 0) return;
    // Of blocks: finite leaves whose sum is not, from this block on.
    const int64_t leaf =
        of_blocks ? std::min((bad.leaf + 1) * leaves_.micro_steps, leaves_.leaves) - 1 : bad.leaf;
    const Overflow here{.micro_step = leaves_.micro_step_of(leaf),
                        .unit_order = life.backward_order,
                        .leaf = leaf,
                        .unit = unit.plan->unit->index(),
                        .segment = segment,
                        .element = bad.element,
                        .nan = bad.nan};
    if (here.before(first)) first = here;
  };
  const bool by_step = state_.plan().options().reduce_every == ReduceEvery::step;
  for (const UnitState& unit : state_.units()) {
    for (int s = 0; s < static_cast<int>(unit.segments.size()); ++s) {
      consider(unit, s, false);
      if (by_step) consider(unit, s, true);
    }
  }
  return first;
}

}  // namespace shardrun
