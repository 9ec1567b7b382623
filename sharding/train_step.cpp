#include "sharding/train_step.h"

#include <algorithm>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "runtime/range.h"

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

// Leaves between two waits for the device: a step's. Evaluating waits whenever as many went by, which
// should not be at each.
static int64_t slots_of(const LeafPlan& leaves) {
  return std::max<int64_t>(leaves.micro_steps, 8);
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
      clock_(stream),
      tally_(slots_of(leaves_), memory, stream),
      feed_(slots_of(leaves_), Shape{options.micro_batch, options.seq_len}, model.vocabulary(),
            stream),
      leaf_nominal_(static_cast<double>(options.micro_batch * options.seq_len)) {
  SHARDRUN_CHECK(options.shard.world_size == comm.size(), "plan for {} ranks, {} are here",
                 options.shard.world_size, comm.size());
  state_ = std::make_unique<ShardState>(plan_, options.update, options.seed, comm.rank(), memory);
  const RunnerOptions runner{.seed = options.seed,
                             .activation_dtype = compute_dtype(options.shard.precision),
                             .recompute_every = options.recompute_every};
  Prefetch prefetch;
  if (comm.size() > 1) prefetch.units = options.prefetch;
  if (prefetch.units > 0 && options.shard.zero == 3) {
    const Shape tokens{options.micro_batch, options.seq_len};
    prefetch.training = unit_order(model, plan_, tokens, true);
    prefetch.evaluation = unit_order(model, plan_, tokens, false);
  }
  if (prefetch.units > 0 && stream.device()) {
    communication_ = std::make_unique<Stream>(*stream.device(), 0, Priority::communication);
  }
  const Lanes lanes{.compute = stream,
                    .communication = communication_ ? *communication_ : stream,
                    .overlap = prefetch.units > 0 && stream.kind() != DeviceKind::cpu};
  runner_ = std::make_unique<ShardedRunner>(model, *state_, leaves_, comm, memory, lanes, runner,
                                            std::move(prefetch));
  clock_.weigh(0);
  runner_->set_watch(&clock_);
}

TrainStep::~TrainStep() {
  for (Stream* stream : {communication_.get(), &stream_}) {
    if (!stream) continue;
    try {
      comm_.synchronize(*stream);
    } catch (const Error&) {  // the device or the partners are gone: nothing is read any more
    }
  }
}

void TrainStep::initialize() {
  memory_.begin("initialize");
  state_->initialize(comm_, stream_);
  memory_.end();
}

StepReport TrainStep::operator()(int64_t step, double lr, LeafSource& source, bool stop_request,
                                 bool writer_quiet) {
  StepReport report;
  report.loss_scale = scaler_.scale();
  StepRecord record;
  record.stop = stop_request;
  record.writer_quiet = writer_quiet;
  runner_->begin_step();
  tally_.begin();
  const float seed = static_cast<float>(scaler_.scale() / leaf_nominal_);

  for (int64_t m = 0; m < leaves_.micro_steps; ++m) {
    const bool last = m + 1 == leaves_.micro_steps;
    if (comm_.size() > 1) clock_.weigh(last ? static_cast<double>(leaves_.micro_steps) : 0);
    const Range range("micro_step");
    memory_.begin("micro_step");
    runner_->begin_micro_step(step, m);  // may be no leaf: then this rank only serves the others
    {
      const Shape shape{options_.micro_batch, options_.seq_len};
      Batch batch{runner_->pool().make(Dtype::int32, shape, "tokens"),
                  runner_->pool().make(Dtype::int32, shape, "targets")};
      feed_.fill(batch.tokens, batch.targets, [&](Tensor tokens, Tensor targets) {
        source.training_leaf(step, leaves_.leaf(m, comm_.rank()), tokens, targets);
      });
      Loss loss = model_.forward(*runner_, batch);
      tally_.add(loss);
      batch = Batch();
      runner_->backward(loss, seed);
    }
    runner_->end_micro_step();
    memory_.end();
  }

  memory_.begin("update");
  if (comm_.size() > 1) clock_.weigh(1);
  clock_.wait_begins();
  runner_->finish_sums();
  clock_.wait_ends(0);
  sum_squares();
  {
    const Range range("decision");
    collect(record);
    report.exposed_seconds = clock_.take_seconds();
    report.decision =
        decide(record, scaler_.scale(), leaf_nominal_, options_.update.grad_clip, comm_);
  }
  // On meta nothing is valid; the update still belongs to the plan.
  if (report.decision.apply() || stream_.kind() == DeviceKind::meta) {
    update(step, lr, report.decision);
  }
  memory_.end();
  clock_.weigh(0);

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

void TrainStep::sum_squares() {
  for (UnitState& unit : state_->units()) {
    for (SegmentState& part : unit.segments) {
      const Shape blocks{part.plan->slice / kBlock};
      OwnedTensor squares = allocate_tensor(memory_, Dtype::fp64, blocks, "block squares");
      kernels::block_squares(squares.tensor, part.sum.total, stream_);
      tally_.add_squares(squares.tensor);
    }
  }
}

void TrainStep::collect(StepRecord& record) {
  tally_.fetch();
  runner_->fetch_overflow();
  comm_.synchronize(stream_);
  tally_.read(record);
  record.overflow = runner_->overflow();
  feed_.rewind();
}

void TrainStep::update(int64_t step, double lr, const Decision& decision) {
  const Range range("update");
  ++applied_steps_;
  const kernels::AdamwScalars scalars{.lr = lr,
                                      .beta1 = options_.update.beta1,
                                      .beta2 = options_.update.beta2,
                                      .eps = options_.update.eps,
                                      .t = applied_steps_,
                                      .gradient_factor = decision.gradient_factor};
  const bool whole = plan_.options().zero == 0;
  const Lanes& lanes = runner_->lanes();
  for (UnitState& unit : state_->units()) {
    for (SegmentState& part : unit.segments) {
      for (kernels::AdamwRange& range : part.ranges) range.key.step = static_cast<uint32_t>(step);
      const Tensor copy = whole ? part.compute_full : part.compute_slice;
      kernels::adamw(part.master, part.plan->compute == Dtype::fp32 ? Tensor() : copy, part.moment1,
                     part.moment2, whole ? part.sum_full : part.sum.total, scalars, part.ranges,
                     stream_);
    }
    if (!state_->gathers_compute()) continue;
    copies_.begin(lanes);  // gathered while the next unit is updated
    ShardState::gather_compute(unit, comm_, lanes.communication);
    copies_.end(lanes);
  }
  copies_.settle(lanes);
}

Evaluation TrainStep::evaluate(int64_t leaves, LeafSource& source) {
  StepRecord record;
  runner_->begin_step();
  tally_.begin();
  const int world = comm_.size();
  for (int64_t first = 0; first < leaves; first += world) {
    memory_.begin("evaluate");
    const int64_t leaf = first + comm_.rank();
    runner_->begin_evaluation(leaf < leaves ? leaf : -1);
    {
      const Shape shape{options_.micro_batch, options_.seq_len};
      Batch batch{runner_->pool().make(Dtype::int32, shape, "tokens"),
                  runner_->pool().make(Dtype::int32, shape, "targets")};
      feed_.fill(batch.tokens, batch.targets, [&](Tensor tokens, Tensor targets) {
        source.evaluation_leaf(leaf, tokens, targets);
      });
      tally_.add(model_.forward(*runner_, batch));
    }
    runner_->end_leaf();
    stream_.set_idle(false);
    memory_.end();
    if (tally_.full()) collect(record);
  }
  collect(record);
  const Decision sum = decide(record, 1, 1, 0, comm_);
  return {sum.loss, sum.valid};
}

void TrainStep::predict(Tensor logits, ConstTensor tokens) {
  memory_.begin("predict");
  runner_->begin_leaf({}, false);
  {
    const Value input = runner_->pool().make(Dtype::int32, tokens.shape(), "tokens");
    const size_t bytes = tokens.bytes() + logits.bytes();
    if (stream_.device() && predicted_.bytes() < bytes) {
      predicted_ = HostBuffer(stream_.device(), bytes, "tokens and logits");
    }
    // On a GPU by way of pinned memory.
    const void* from = tokens.data();
    float* to = static_cast<float*>(logits.data());
    if (stream_.device()) {
      check_range("token", tokens, 0, model_.vocabulary());
      to = predicted_.as<float>();
      from = std::memcpy(to + logits.numel(), from, tokens.bytes());
    }
    copy_from_host(input.tensor(), from, stream_);
    const Value value = model_.predict(*runner_, input);
    const Tensor& padded = value.tensor();
    const int64_t rows = padded.shape().rows(), columns = padded.shape().columns();
    const int64_t vocabulary = model_.vocabulary();
    SHARDRUN_CHECK(logits.numel() == rows * vocabulary, "logits {} for {} rows",
                   logits.shape().text(), rows);
    const Value row = runner_->pool().make(Dtype::fp32, Shape{vocabulary}, "logits");
    for (int64_t r = 0; r < rows; ++r) {
      kernels::cast(row.tensor(), padded.flat(r * columns, vocabulary), stream_);
      copy_to_host(to + r * vocabulary, row.tensor(), stream_);
    }
    comm_.synchronize(stream_);
    if (stream_.device()) std::memcpy(logits.data(), to, logits.bytes());
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
