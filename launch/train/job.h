// From a Config to the parts of a training job: the model, the options of a step, the numerics key.
#pragma once

#include <memory>
#include <string>

#include "launch/config/config.h"
#include "models/gpt.h"
#include "sharding/train_step.h"

namespace shardrun {

class RankDevice;

// The preset with the config's overrides. `vocabulary` is the tokenizer's.
GptConfig gpt_config(const Config& config, int64_t vocabulary);

// For ranks that talk over `transport`: a Communicator's, or one that is planned for.
StepOptions step_options(const Config& config, const BatchPlan& batch, int world_size,
                         const std::string& transport, int64_t seq_len);
// Units to gather ahead. Where nobody says none, if a call holds the host up: what it could overlap with
// has not been given to the device yet.
int prefetch_units(const Config& config, const std::string& transport);
std::string scaler_policy(const Config& config);

// Everything besides the data that decides bits, and nothing that does not: no ranks, threads, stages.
std::string numerics_key(const Config& config, const StepOptions& options, RankDevice& device);

// Which parameters decay and which do not, with counts: a line each, printed at start.
std::string decay_text(const Model& model);

// Byte count as "1.5 GiB", count as "124.4 M".
std::string bytes_text(double bytes);
std::string count_text(double count);

}  // namespace shardrun
