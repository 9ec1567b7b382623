// metrics.jsonl: one JSON object a step, written by the rank that reports and read by `report`, by
// plots and by whoever resumes. Numbers read back to the same bits; what is not finite, or was not
// measured, is null.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>

namespace shardrun {

inline constexpr double kNotMeasured = std::numeric_limits<double>::quiet_NaN();

struct StepMetrics {
  int64_t step = 0;           // steps done, counted from 1
  int64_t applied_steps = 0;  // of these, not skipped
  double loss = kNotMeasured;
  double grad_norm = kNotMeasured;  // before clipping
  double lr = kNotMeasured;
  double loss_scale = 1;
  bool skipped = false;
  int64_t tokens = 0;  // all so far
  double tokens_per_s = kNotMeasured;
  double step_ms = kNotMeasured;
  double mfu = kNotMeasured;              // of the device's peak, 0 to 1
  // For which the reporting rank's computation stood still for tensors of other ranks: see
  // StepReport::exposed_seconds. The decision, a few hundred bytes between hosts, is not in it.
  double comm_exposed_ms = kNotMeasured;
  int64_t mem_bytes = 0;                  // high-water mark of the rank
  std::optional<double> val_loss;         // absent where the step was not evaluated
};

// One line, without the newline.
std::string to_json(const StepMetrics& metrics);

class MetricsWriter {
 public:
  // Goes on with a file of an earlier run: lines of steps after `last_step`, and a last line cut
  // short, are dropped; 0 starts anew. CannotCreateError, IoError.
  MetricsWriter(std::string path, int64_t last_step);
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;
  ~MetricsWriter();
  // On disk's way (flushed) when it returns. IoError.
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace shardrun
