#include "sharding/snapshot.h"

#include "kernels/elementwise.h"

namespace shardrun {

namespace {

// Pieces lie at addresses that any dtype may have.
size_t padded_bytes(const CheckpointPiece& piece) {
  return (piece.data.bytes() + 63) / 64 * 64;
}

}  // namespace

Tensor truth_of(const SegmentState& part, bool whole) {
  if (part.master.present()) return part.master;
  return whole ? part.compute_full : part.compute_slice;
}

std::vector<CheckpointPiece> pieces_of(TrainStep& step) {
  std::vector<CheckpointPiece> pieces;
  const bool whole = step.options().shard.zero == 0;
  for (UnitState& unit : step.state().units()) {
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      const SegmentState& part = unit.segments[s];
      // At stage 0 every rank holds everything: it still brings only its own slice.
      const int64_t own = step.state().rank() * part.plan->slice;
      const int64_t skip = own - part.state_begin;
      ShardState::for_each_piece(
          *unit.plan, static_cast<int>(s), own, part.plan->slice,
          [&](const ParameterPlace& place, int64_t in_parameter, int64_t in_slice, int64_t count) {
            const int64_t at = skip + in_slice;
            auto add = [&](TensorKind kind, const Tensor& tensor) {
              pieces.push_back({place.spec->name, kind, place.spec->shape, in_parameter,
                                tensor.flat(at, count)});
            };
            add(TensorKind::master, truth_of(part, whole));
            add(TensorKind::moment1, part.moment1);
            add(TensorKind::moment2, part.moment2);
          });
    }
  }
  return pieces;
}

const std::byte* StreamSource::fetch(const CheckpointPiece& piece, int64_t begin, int64_t count,
                                     std::byte*) {
  const ConstTensor part = piece.data.flat(begin, count);
  if (stream_.device() == nullptr) return static_cast<const std::byte*>(part.data());
  constexpr auto kMost = static_cast<size_t>(kMostBytes);
  SHARDRUN_CHECK(part.bytes() <= kMost, "fetch of {} bytes, {} at most", part.bytes(), kMost);
  if (!pinned_.data()) pinned_ = HostBuffer(stream_.device(), kMost, "a block of a save");
  copy_to_host(pinned_.data(), part, stream_);
  stream_.synchronize();
  return pinned_.data();
}

StateCopy::StateCopy(TrainStep& step, Memory& memory, Device* device) {
  for (const CheckpointPiece& piece : pieces_of(step)) bytes_ += padded_bytes(piece);
  if (device != nullptr) return;
  owned_ = allocate_tensor(memory, Dtype::uint8, {static_cast<int64_t>(bytes_)}, "save snapshot");
  data_ = static_cast<std::byte*>(owned_.tensor.data());
}

std::vector<CheckpointPiece> StateCopy::take(TrainStep& step, Stream& stream) {
  if (stream.device() != nullptr && data_ == nullptr) {
    pinned_ = HostBuffer(stream.device(), bytes_, "save snapshot");
    data_ = pinned_.data();
  }
  std::vector<CheckpointPiece> pieces = pieces_of(step);
  std::byte* to = data_;
  for (CheckpointPiece& piece : pieces) {
    const size_t bytes = padded_bytes(piece);
    SHARDRUN_CHECK(to + bytes <= data_ + bytes_, "the snapshot has {} bytes", bytes_);
    copy_to_host(to, piece.data, stream);
    piece.data = ConstTensor(to, piece.data.dtype(), piece.data.shape());
    to += bytes;
  }
  stream.synchronize();
  return pieces;
}

CheckpointState state_of(const TrainStep& step, int64_t steps_done) {
  CheckpointState state;
  state.step = steps_done;
  state.applied_steps = step.applied_steps();
  const LossScaler& scaler = step.scaler();
  const ScalerState& s = scaler.state();
  state.skipped = s.total_skips;
  state.skipped_in_a_row = s.consecutive_skips;
  state.scaler_policy = scaler.policy();
  state.scaler_numbers = {{"scale", s.scale}};
  state.scaler_counts = {{"good_steps", s.good_steps},
                         {"hysteresis", s.hysteresis},
                         {"iteration", s.iteration},
                         {"last_overflow", s.last_overflow},
                         {"consecutive_skips", s.consecutive_skips},
                         {"total_skips", s.total_skips}};
  state.seed = step.options().seed;
  state.precision = name_of(step.options().shard.precision);
  return state;
}

void for_each_state_piece(
    TrainStep& step, bool moments,
    FunctionRef<void(const ParameterSpec&, TensorKind, int64_t begin, Tensor)> take) {
  const bool whole = step.options().shard.zero == 0;
  for (UnitState& unit : step.state().units()) {
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      SegmentState& part = unit.segments[s];
      ShardState::for_each_piece(
          *unit.plan, static_cast<int>(s), part.state_begin, part.state_size,
          [&](const ParameterPlace& place, int64_t in_parameter, int64_t at, int64_t count) {
            const auto give = [&](TensorKind kind, const Tensor& tensor) {
              take(*place.spec, kind, in_parameter, tensor.flat(at, count));
            };
            give(TensorKind::master, truth_of(part, whole));
            if (!moments) return;
            give(TensorKind::moment1, part.moment1);
            give(TensorKind::moment2, part.moment2);
          });
    }
  }
}

void check_holds(TrainStep& step, const CheckpointReader& reader, bool moments) {
  for_each_state_piece(step, moments,
                       [&](const ParameterSpec& spec, TensorKind kind, int64_t, const Tensor&) {
                         reader.expect(spec.name, kind, spec.shape);
                       });
}

static void read_tensors(TrainStep& step, CheckpointReader& reader, bool moments) {
  check_holds(step, reader, moments);  // before anything is overwritten
  for_each_state_piece(step, moments,
                       [&](const ParameterSpec& spec, TensorKind kind, int64_t begin, Tensor out) {
                         fill_from_host(out, step.runner().stream(), [&](int64_t at, Tensor host) {
                           reader.read(spec.name, kind, begin + at, host);
                         });
                       });
}

void restore_parameters(TrainStep& step, CheckpointReader& reader) {
  read_tensors(step, reader, false);
}

void restore_parameters(TrainStep& step, ParameterSource& source) {
  for_each_state_piece(
      step, false, [&](const ParameterSpec& spec, TensorKind, int64_t begin, Tensor out) {
        fill_from_host(out, step.runner().stream(),
                       [&](int64_t at, Tensor host) { source.read(spec, begin + at, host); });
      });
}

void restore(TrainStep& step, CheckpointReader& reader) {
  read_tensors(step, reader, true);
  restore_counters(step, reader.state(), reader.folder().string());
}

void restore_counters(TrainStep& step, const CheckpointState& saved, const std::string& where) {
  step.set_applied_steps(saved.applied_steps);
  // A run without loss scale has no scale to hand on.
  if (saved.scaler_policy != "none" || step.scaler().policy() == "none") {
    auto count = [&](const char* name) {
      const auto it = saved.scaler_counts.find(name);
      if (it == saved.scaler_counts.end()) {
        throw DataError("{}: the scaler state has no '{}'", where, name);
      }
      return it->second;
    };
    ScalerState state;
    const auto scale = saved.scaler_numbers.find("scale");
    if (scale == saved.scaler_numbers.end()) {
      throw DataError("{}: the scaler state has no 'scale'", where);
    }
    state.scale = scale->second;
    state.good_steps = count("good_steps");
    state.hysteresis = count("hysteresis");
    state.iteration = count("iteration");
    state.last_overflow = count("last_overflow");
    state.consecutive_skips = count("consecutive_skips");
    state.total_skips = count("total_skips");
    if (saved.scaler_counts.size() != 6 || saved.scaler_numbers.size() != 1) {
      const CheckpointState known = state_of(step, 0);
      const auto refuse_unknown = [&](const auto& found, const auto& wanted) {
        for (const auto& [key, value] : found) {
          if (wanted.contains(key)) continue;
          throw DataError(
              "{}: the scaler state has an unknown key `{}`: written by a newer version", where,
              key);
        }
      };
      refuse_unknown(saved.scaler_counts, known.scaler_counts);
      refuse_unknown(saved.scaler_numbers, known.scaler_numbers);
    }
    step.scaler().restore(state);
  }
}

}  // namespace shardrun
