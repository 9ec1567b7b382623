// What a report shows of metrics.jsonl, in bounded memory however long the run was: totals, and
// each quantity as a series of at most kMaxBuckets ranges of steps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardrun {

// Values over steps. Short runs are kept as they are; in longer ones neighbouring steps share a
// bucket that keeps their lowest and highest value, so that no spike is lost.
class Series {
 public:
  static constexpr size_t kMaxBuckets = 512;
  // Beyond it a value is drawn at it: sums and differences of values stay finite.
  static constexpr double kLargest = 1e150;

  struct Bucket {
    int64_t first, last;  // steps
    double low, high, mean;
    int64_t count;
  };

  // `step` is >= 1 and above the last; `value` is finite.
  void add(int64_t step, double value);
  const std::vector<Bucket>& buckets() const { return buckets_; }
  bool thinned() const { return width_ > 1; }

 private:
  void put(const Bucket& bucket);

  int64_t width_ = 1;  // steps in a bucket
  std::vector<Bucket> buckets_;
};

struct History {
  static constexpr int64_t kLargestStep = int64_t{1} << 53;

  Series loss, val_loss, grad_norm, lr, loss_scale, tokens_per_s;
  Series skips;  // 1 at each skipped step
  int64_t lines = 0, first_step = 0, last_step = 0, applied_steps = 0, skipped = 0, tokens = 0;
  int64_t mem_bytes = 0;
  double total_ms = 0;
  std::optional<double> last_loss, last_val_loss, best_val_loss;
  int64_t best_val_step = 0;
};

// Reads line by line. A last line without its newline was cut and is ignored; null is "not
// measured". NoInputError: no such file; DataError: names file and line.
History read_history(const std::string& path);

}  // namespace shardrun
