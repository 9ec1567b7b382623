#include "sharding/train_step.h"

#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace shardrun {

static int64_t count_leaves(const StepOptions& options) {
  if (options.micro_batch < 1 || options.global_batch < 1 ||
      options.global_batch % options.micro_batch != 0) {
    throw ConfigError("--global-batch {} is not a multiple of --micro-batch {}",
                      options.global_batch, options.micro_batch);
  }
  const int64_t leaves = options.global_batch / options.micro_batch;
  if (leaves > kernels::kMaxLeaves) {
    throw ConfigError(
        "--global-batch {} by --micro-batch {} are {} micro-batches a step, wanted {} at most",
        options.global_batch, options.micro_batch, leaves, kernels::kMaxLeaves);
  }
  return leaves;
}

TrainStep::TrainStep(const Model& model, const StepOptions& options,
                     const std::string& scaler_policy, Communicator& comm, Memory& memory,
                     Stream& stream)
    : model_(model),
      options_(options),
      plan_(model, options.shard),
      leaves_(plan_leaves(count_leaves(options), options.shard)),
      comm_(comm),
      memory_(memory),
      stream_(stream),
      scaler_(LossScaler::from_policy(scaler_policy)),
      leaf_nominal_(static_cast<double>(options.micro_batch * options.seq_len)) {
  SHARDRUN_CHECK(options.shard.world_size == comm.size(), "plan for {} ranks, {} are here",
                 options.shard.world_size, comm.size());
  state_ = std::make_unique<ShardState>(plan_, options.update, options.seed, comm.rank(), memory);
  const RunnerOptions runner{.seed = options.seed,
                             .activation_dtype = compute_dtype(options.shard.precision),
                             .recompute_every = options.recompute_every};
  runner_ = std::make_unique<ShardedRunner>(model, *state_, leaves_, comm, memory, stream, runner);
}

void TrainStep::initialize() {
  memory_.begin("initialize");
  state_->initialize(comm_, stream_);
  memory_.end();
}

StepReport TrainStep::operator()(int64_t step, double lr, LeafSource& source, bool stop_request) {
  StepReport report;
  report.loss_scale = scaler_.scale();
  StepRecord record;
  record.stop = stop_request;
  runner_->begin_step();
  const float seed = static_cast<float>(scaler_.scale() / leaf_nominal_);

  for (int64_t m = 0; m < leaves_.micro_steps; ++m) {
    memory_.begin("micro_step");
    runner_->begin_micro_step(step, m);  // may be no leaf: then this rank only serves the others
    {
      const Shape shape{options_.micro_batch, options_.seq_len};
      Batch batch{runner_->pool().make(Dtype::int32, shape, "tokens"),
                  runner_->pool().make(Dtype::int32, shape, "targets")};
      if (stream_.computes()) {
        source.training_leaf(step, leaves_.leaf(m, comm_.rank()), batch.tokens, batch.targets);
      }
      Loss loss = model_.forward(*runner_, batch);
      account(loss, record);
      batch = Batch();
      runner_->backward(loss, seed);
    }
    runner_->end_micro_step();
    memory_.end();
  }

  memory_.begin("update");
  runner_->finish_sums();
  sum_squares(record);
  runner_->fetch_overflow();
  stream_.synchronize();
  record.overflow = runner_->overflow();
  report.decision =
      decide(record, scaler_.scale(), leaf_nominal_, options_.update.grad_clip, comm_);
  // On meta nothing is valid; the update still belongs to the plan.
  if (report.decision.apply() || stream_.kind() == DeviceKind::meta) {
    update(step, lr, report.decision);
  }
  memory_.end();

  // After the update: the gradients were unscaled by the scale that backward used.
  switch (report.decision.outcome) {
    case Outcome::apply:
      report.scaler = scaler_.update(LossScaler::Outcome::good);
      break;
    case Outcome::overflow:
      report.scaler = scaler_.update(LossScaler::Outcome::overflow);
      report.overflow_text = describe(report.decision.overflow);
      break;
    case Outcome::empty:
      report.scaler = scaler_.update(LossScaler::Outcome::empty);
      break;
  }
  return report;
}

void TrainStep::account(const Loss& loss, StepRecord& record) {
  if (!stream_.computes()) return;
  record.loss.add(static_cast<double>(*loss.sum.tensor().as<float>()));
  record.valid += *loss.valid.tensor().as<int64_t>();
}

void TrainStep::sum_squares(StepRecord& record) {
  for (UnitState& unit : state_->units()) {
    for (SegmentState& part : unit.segments) {
      const int64_t blocks = part.plan->slice / kBlock;
      OwnedTensor squares = allocate_tensor(memory_, Dtype::fp64, Shape{blocks}, "block squares");
      kernels::block_squares(squares.tensor, part.sum.total, stream_);
      if (!stream_.computes()) continue;
      const double* values = squares.tensor.as<double>();
      for (int64_t b = 0; b < blocks; ++b) record.squares.add(values[b]);
    }
  }
}

void TrainStep::update(int64_t step, double lr, const Decision& decision) {
  ++applied_steps_;
  const kernels::AdamwScalars scalars{.lr = lr,
                                      .beta1 = options_.update.beta1,
                                      .beta2 = options_.update.beta2,
                                      .eps = options_.update.eps,
                                      .t = applied_steps_,
                                      .gradient_factor = decision.gradient_factor};
  const bool whole = plan_.options().zero == 0;
  for (UnitState& unit : state_->units()) {
    for (SegmentState& part : unit.segments) {
      for (kernels::AdamwRange& range : part.ranges) range.key.step = static_cast<uint32_t>(step);
      const Tensor copy = whole ? part.compute_full : part.compute_slice;
      kernels::adamw(part.master, part.plan->compute == Dtype::fp32 ? Tensor() : copy, part.moment1,
                     part.moment2, whole ? part.sum_full : part.sum.total, scalars, part.ranges,
                     stream_);
    }
  }
  state_->refresh_compute(false, comm_, stream_);
}

Evaluation TrainStep::evaluate(int64_t leaves, LeafSource& source) {
  StepRecord record;
  const int world = comm_.size();
  for (int64_t first = 0; first < leaves; first += world) {
    memory_.begin("evaluate");
    const int64_t leaf = first + comm_.rank();
    stream_.set_idle(leaf >= leaves);
    runner_->begin_leaf({0, leaf}, false);
    {
      const Shape shape{options_.micro_batch, options_.seq_len};
      Batch batch{runner_->pool().make(Dtype::int32, shape, "tokens"),
                  runner_->pool().make(Dtype::int32, shape, "targets")};
      if (stream_.computes()) source.evaluation_leaf(leaf, batch.tokens, batch.targets);
      account(model_.forward(*runner_, batch), record);
    }
    runner_->end_leaf();
    stream_.set_idle(false);
    memory_.end();
  }
  const Decision sum = decide(record, 1, 1, 0, comm_);
  return {sum.loss, sum.valid};
}

void TrainStep::predict(Tensor logits, ConstTensor tokens) {
  memory_.begin("predict");
  runner_->begin_leaf({}, false);
  {
    const Value value = model_.predict(*runner_, runner_->pool().wrap(tokens));
    const Tensor& padded = value.tensor();
    const int64_t rows = padded.shape().rows(), columns = padded.shape().columns();
    SHARDRUN_CHECK(logits.numel() == rows * model_.vocabulary(), "logits {} for {} rows",
                   logits.shape().text(), rows);
    for (int64_t row = 0; row < rows; ++row) {
      kernels::cast(logits.flat(row * model_.vocabulary(), model_.vocabulary()),
                    padded.flat(row * columns, model_.vocabulary()), stream_);
    }
  }
  runner_->end_leaf();
  memory_.end();
}

std::string TrainStep::describe(const Overflow& overflow) const {
  const ParameterPlace* place =
      plan_.find(static_cast<int>(overflow.unit), static_cast<int>(overflow.segment),
                 overflow.element);
  const std::string where =
      place ? fmt::format("{}[{}]", place->spec->name, overflow.element - place->offset)
            : fmt::format("padding of {}", plan_.units()[overflow.unit].unit->path());
  return fmt::format("gradient of {} is {} on rank {}, micro-step {}, leaf {}", where,
                     overflow.nan ? "nan" : "inf", leaves_.rank_of(overflow.leaf),
                     overflow.micro_step, overflow.leaf);
}

}  // namespace shardrun
