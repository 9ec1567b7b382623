#include "sharding/shard_state.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/initialize.h"

namespace shardrun {

bool is_decayed(const ParameterSpec& spec) { return spec.shape.rank() >= 2; }

void ShardState::for_each_piece(
    const UnitPlan& unit, int segment, int64_t begin, int64_t size,
    FunctionRef<void(const ParameterPlace&, int64_t, int64_t, int64_t)> visit) {
  for (int i : unit.segments[segment].places) {
    const ParameterPlace& place = unit.places[i];
    const int64_t first = std::max(begin, place.offset);
    const int64_t last = std::min(begin + size, place.offset + place.numel);
    if (first < last) visit(place, first - place.offset, first - begin, last - first);
  }
}

Tensor ShardState::keep(Dtype dtype, int64_t n, const char* label) {
  OwnedTensor owned = allocate_tensor(memory_, dtype, Shape{n}, label);
  buffers_.push_back(std::move(owned.buffer));
  return owned.tensor;
}

ShardState::ShardState(const ShardPlan& plan, const UpdateOptions& options, uint64_t seed, int rank,
                       Memory& memory)
    : plan_(plan), seed_(seed), rank_(rank), memory_(memory) {
  const ShardOptions& shard = plan.options();
  const int zero = shard.zero;
  const bool by_step = shard.reduce_every == ReduceEvery::step;
  for (const UnitPlan& unit : plan.units()) {
    UnitState state;
    state.plan = &unit;
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      const SegmentPlan& segment = unit.segments[s];
      const int64_t n = segment.slice, full = segment.full, own = rank * n;
      SegmentState part;
      part.plan = &segment;
      part.state_begin = zero == 0 ? 0 : own;
      part.state_size = zero == 0 ? full : n;
      const bool in_fp32 = segment.compute == Dtype::fp32;
      if (zero < 3) {
        part.compute_full = keep(segment.compute, full, "parameters");
        part.compute_slice = part.compute_full.flat(own, n);
      } else {
        part.compute_slice = keep(segment.compute, n, "parameters");
      }
      if (in_fp32) {
        part.master = zero == 0 ? part.compute_full : part.compute_slice;
      } else if (has_master(shard.precision)) {
        part.master = keep(Dtype::fp32, part.state_size, "master");
      }
      part.moment1 = keep(Dtype::fp32, part.state_size, "moment1");
      part.moment2 = keep(Dtype::fp32, part.state_size, "moment2");
      if (zero == 0) {
        part.sum_full = keep(Dtype::fp32, full, "gradient sum");
        part.sum.total = part.sum_full.flat(own, n);
      } else {
        part.sum.total = keep(Dtype::fp32, n, "gradient sum");
      }
      if (by_step) {
        part.block_full = keep(Dtype::fp32, full, "gradient block");
      } else if (shard.sum_block > 1) {
        part.sum.block = keep(Dtype::fp32, n, "gradient block");
      }
      for_each_piece(unit, static_cast<int>(s), part.state_begin, part.state_size,
                     [&](const ParameterPlace& place, int64_t in_parameter, int64_t in_range,
                         int64_t count) {
                       kernels::AdamwRange range;
                       range.begin = in_range;
                       range.end = in_range + count;
                       range.weight_decay = static_cast<float>(
                           is_decayed(*place.spec) ? options.weight_decay : 0.0);
                       range.key = random_key(seed, Purpose::stochastic_rounding,
                                              hash_name(place.spec->name), 0, 0);
                       range.model_begin = in_parameter;
                       part.ranges.push_back(range);
                     });
      state.segments.push_back(std::move(part));
    }
    units_.push_back(std::move(state));
  }
}

void ShardState::initialize(Communicator& comm, Stream& stream) {
  for (UnitState& unit : units_) {
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      SegmentState& part = unit.segments[s];
      kernels::fill(part.moment1, 0, stream);
      kernels::fill(part.moment2, 0, stream);
      // Without a master the values are drawn in fp32 first and rounded to nearest.
      OwnedTensor drawn;
      Tensor values = part.master;
      if (!values.present()) {
        drawn = allocate_tensor(memory_, Dtype::fp32, Shape{part.state_size}, "initial values");
        values = drawn.tensor;
      }
      kernels::fill(values, 0, stream);
      for_each_piece(*unit.plan, static_cast<int>(s), part.state_begin, part.state_size,
                     [&](const ParameterPlace& place, int64_t in_parameter, int64_t in_range,
                         int64_t count) {
                       kernels::initialize_range(values.flat(in_range, count), *place.spec,
                                                 in_parameter, seed_, stream);
                     });
      if (!part.master.present()) {
        kernels::cast(plan_.options().zero == 0 ? part.compute_full : part.compute_slice, values,
                      stream);
      }
    }
  }
  refresh_compute(comm, stream);
}

void ShardState::refresh_compute(Communicator& comm, Stream& stream) {
  for (UnitState& unit : units_) {
    for (SegmentState& part : unit.segments) {
      const Tensor& copy = plan_.options().zero == 0 ? part.compute_full : part.compute_slice;
      if (part.master.present() && copy.dtype() != Dtype::fp32) {
        kernels::cast(copy, part.master, stream);
      }
    }
    if (gathers_compute()) gather_compute(unit, comm, stream);
  }
}

void ShardState::gather_compute(UnitState& unit, Communicator& comm, Stream& stream) {
  for (SegmentState& part : unit.segments) {
    comm.all_gather(part.compute_full, part.compute_slice, stream);
  }
}

}  // namespace shardrun
