#include "launch/report/history.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace shardrun {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxLine = size_t{1} << 16;

std::optional<double> number(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) return std::nullopt;
  if (!found->is_number()) throw DataError("{}: got {}, wanted a number", name, found->type_name());
  return found->get<double>();
}

int64_t whole(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) return 0;
  if (!found->is_number_integer() || *found < 0 || *found > INT64_MAX) {
    throw DataError("{}: wanted a whole number of at least 0", name);
  }
  return found->get<int64_t>();
}

bool truth(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return false;
  if (!found->is_boolean())
    throw DataError("{}: got {}, wanted a boolean", name, found->type_name());
  return found->get<bool>();
}

void add_line(History& history, const std::string& line) {
  const Json object = Json::parse(line, nullptr, false);
  // The parser takes a zero byte for the end.
  if (!object.is_object() || line.find('\0') != std::string::npos) {
    throw DataError("not a JSON object");
  }
  const int64_t step = whole(object, "step");
  if (step <= history.last_step || step > History::kLargestStep) {
    throw DataError("step: got {}, wanted a number from {} to 2^53", step, history.last_step + 1);
  }
  const auto add = [&](Series& series, const char* name) {
    const std::optional<double> value = number(object, name);
    if (value) series.add(step, *value);
    return value;
  };
  const std::optional<double> loss = add(history.loss, "loss");
  const std::optional<double> val_loss = add(history.val_loss, "val_loss");
  add(history.grad_norm, "grad_norm");
  add(history.lr, "lr");
  add(history.loss_scale, "loss_scale");
  add(history.tokens_per_s, "tokens_per_s");
  if (truth(object, "skipped")) {
    history.skips.add(step, 1);
    ++history.skipped;
  }
  if (history.lines++ == 0) history.first_step = step;
  history.last_step = step;
  history.applied_steps = whole(object, "applied_steps");
  history.tokens = whole(object, "tokens");
  history.mem_bytes = std::max(history.mem_bytes, whole(object, "mem_bytes"));
  history.total_ms += number(object, "step_ms").value_or(0);
  history.last_loss = loss;
  if (!val_loss) return;
  history.last_val_loss = val_loss;
  if (!history.best_val_loss || *val_loss < *history.best_val_loss) {
    history.best_val_loss = val_loss;
    history.best_val_step = step;
  }
}

}  // namespace

void Series::add(int64_t step, double value) {
  const double kept = std::clamp(value, -kLargest, kLargest);
  put({step, step, kept, kept, kept, 1});
  while (buckets_.size() > kMaxBuckets) {
    width_ *= 2;
    const std::vector<Bucket> narrow = std::move(buckets_);
    buckets_.clear();
    for (const Bucket& bucket : narrow) put(bucket);
  }
}

void Series::put(const Bucket& bucket) {
  if (buckets_.empty() || buckets_.back().first / width_ != bucket.first / width_) {
    buckets_.push_back(bucket);
    return;
  }
  Bucket& into = buckets_.back();
  const int64_t count = into.count + bucket.count;
  into.mean +=
      (bucket.mean - into.mean) * (static_cast<double>(bucket.count) / static_cast<double>(count));
  into.count = count;
  into.last = bucket.last;
  into.low = std::min(into.low, bucket.low);
  into.high = std::max(into.high, bucket.high);
}

History read_history(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw NoInputError("{}: cannot read the file", path);
  History history;
  std::vector<char> buffer(kMaxLine);
  for (int64_t number = 1;; ++number) {
    in.getline(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    if (in.bad()) throw IoError("{}: cannot read the file", path);
    if (in.eof()) return history;
    if (in.fail())
      throw DataError("{}:{}: the line is longer than {} bytes", path, number, kMaxLine);
    try {
      // gcount includes the newline.
      add_line(history, std::string(buffer.data(), static_cast<size_t>(in.gcount()) - 1));
    } catch (const DataError& error) {
      throw DataError("{}:{}: {}", path, number, error.what());
    }
  }
}

}  // namespace shardrun
