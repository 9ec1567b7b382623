// `shardrun generate`: continues a prompt from a checkpoint. Ranks compute the same tokens together;
// the first prints them as they come.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "launch/commands.h"
#include "launch/data/tokenizer.h"
#include "launch/train/job.h"
#include "launch/train/rank_device.h"
#include "sharding/snapshot.h"

namespace shardrun {
namespace {

// The next token from logits of one place: the likeliest at temperature 0, else drawn among the top_k
// likeliest (0: all) with a uniform number in [0, 1).
int32_t pick_token(std::span<const float> logits, double temperature, int64_t top_k, double uniform) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (temperature <= 0) return order[0];
  if (top_k > 0 && top_k < static_cast<int64_t>(order.size())) order.resize(top_k);
  std::vector<double> weights;
  for (int32_t token : order) {
    weights.push_back(std::exp((logits[token] - logits[order[0]]) / temperature));
  }
  const double target = uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    sum += weights[i];
    if (target < sum) return order[i];
  }
  return order.back();
}

}  // namespace

int run_generate(const Config& given, RankContext& ranks) {
  Config config = with_defaults(given);
  std::unique_ptr<Gpt> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<CheckpointReader> reader;
  Config trained;
  agree(ranks.comm, [&] {
    if (!config.has_checkpoint()) {
      throw UsageError("generate: --checkpoint is missing, wanted a run's folder or one of its sets");
    }
    reader.emplace(CheckpointReader::open(config.checkpoint()));
    trained = parse_textproto(reader->state().config_text, reader->folder().string());
    tokenizer = make_tokenizer(given.has_tokenizer() ? config.tokenizer() : trained.tokenizer());
    model = std::make_unique<Gpt>(gpt_config(trained, tokenizer->vocabulary()));
  });

  // Generation shards like training at stage 3 and computes in the precision that was trained.
  const int64_t context = trained.seq_len();
  StepOptions options;
  options.shard.world_size = ranks.comm.size();
  options.shard.zero = 3;
  options.shard.precision =
      precision_from_name(given.has_precision() ? config.precision() : trained.precision());
  options.seq_len = context;
  RankDevice device(config, ranks);

  // Every prefix is computed anew at full length: one program, whatever the length.
  std::vector<float> logits_memory(static_cast<size_t>(context * model->vocabulary()));
  std::vector<int32_t> window(static_cast<size_t>(context), 0);
  const Tensor logits(logits_memory.data(), Dtype::fp32, Shape{1, context, model->vocabulary()});
  const Tensor tokens(window.data(), Dtype::int32, Shape{1, context});
  agree(ranks.comm, [&] {
    device.require(options.shard.precision);
    device.plan_memory(ranks, 1, [&](int64_t, Communicator& comm, Memory& memory, Stream& stream) {
      TrainStep rehearsal(*model, options, "none", comm, memory, stream);
      rehearsal.initialize();
      rehearsal.predict(logits, tokens);
    });
  });
  TrainStep step(*model, options, "none", device.comm(), device.memory(), device.stream());
  step.initialize();
  agree(ranks.comm, [&] { restore_parameters(step, *reader); });
  step.state().refresh_compute(device.comm(), device.stream());

  std::vector<int32_t> text = tokenizer->encode(config.prompt());
  if (text.empty()) text = tokenizer->encode("\n");
  if (ranks.leads()) std::fputs(config.prompt().c_str(), stdout);
  for (int64_t n = 0; n < config.tokens(); ++n) {
    const int64_t used = std::min<int64_t>(context, static_cast<int64_t>(text.size()));
    std::copy(text.end() - used, text.end(), window.begin());
    std::fill(window.begin() + used, window.end(), 0);  // causal: what follows is not looked at
    step.predict(logits, tokens);
    const std::span<const float> row(logits_memory.data() + (used - 1) * model->vocabulary(),
                                     static_cast<size_t>(tokenizer->vocabulary()));
    const uint64_t draw = mix64(mix64(static_cast<uint64_t>(config.seed()),
                                      static_cast<uint64_t>(Purpose::sample)),
                                static_cast<uint64_t>(n));
    const double uniform = static_cast<double>(draw >> 11) * 0x1.0p-53;
    text.push_back(pick_token(row, config.temperature(), config.top_k(), uniform));
    if (ranks.leads()) {
      std::fputs(tokenizer->decode(std::span(text).last(1)).c_str(), stdout);
      std::fflush(stdout);
    }
  }
  if (ranks.leads()) std::fputs("\n", stdout);
  return 0;
}

}  // namespace shardrun
