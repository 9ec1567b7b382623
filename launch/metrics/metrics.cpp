#include "launch/metrics/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/error.h"

namespace shardrun {
namespace {

std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  // "-0" would be read as a whole number, which has no sign at zero.
  return value == 0 && std::signbit(value) ? "-0.0" : fmt::format("{}", value);
}

// What of the file at `path` stays: whole lines up to `last_step`.
std::string kept_lines(const std::string& path, int64_t last_step) {
  std::string kept;
  std::ifstream in(path);
  for (std::string line; last_step > 0 && std::getline(in, line);) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (in.eof() || !object.is_object() || !object.contains("step")) continue;
    if (!object["step"].is_number_integer() || object["step"].get<int64_t>() > last_step) continue;
    kept += line + '\n';
  }
  return kept;
}

}  // namespace

std::string to_json(const StepMetrics& m) {
  std::string line = fmt::format(
      R"({{"step": {}, "applied_steps": {}, "loss": {}, "grad_norm": {}, "lr": {}, )"
      R"("loss_scale": {}, "skipped": {}, "tokens": {}, "tokens_per_s": {}, "step_ms": {}, )"
      R"("mfu": {}, "comm_exposed_ms": {}, "mem_bytes": {})",
      m.step, m.applied_steps, number(m.loss), number(m.grad_norm), number(m.lr),
      number(m.loss_scale), m.skipped, m.tokens, number(m.tokens_per_s), number(m.step_ms),
      number(m.mfu), number(m.comm_exposed_ms), m.mem_bytes);
  if (m.val_loss) line += fmt::format(R"(, "val_loss": {})", number(*m.val_loss));
  return line + '}';
}

MetricsWriter::MetricsWriter(std::string path, int64_t last_step) : path_(std::move(path)) {
  const std::string kept = kept_lines(path_, last_step);
  // Beside the file first: what was kept must survive a crash in between.
  const std::string unfinished = path_ + ".tmp";
  file_ = std::fopen(unfinished.c_str(), "wbe");
  if (!file_) throw CannotCreateError("{}: cannot create: {}", unfinished, std::strerror(errno));
  const bool written =
      std::fwrite(kept.data(), 1, kept.size(), file_) == kept.size() && std::fflush(file_) == 0;
  if (!written || std::rename(unfinished.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    std::fclose(file_);
    std::remove(unfinished.c_str());
    throw IoError("{}: cannot write: {}", path_, std::strerror(error));
  }
}

MetricsWriter::~MetricsWriter() {
  std::fclose(file_);
}

void MetricsWriter::write(const StepMetrics& metrics) {
  const std::string line = to_json(metrics) + '\n';
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_) != 0) {
    throw IoError("{}: cannot write: {}", path_, std::strerror(errno));
  }
}

}  // namespace shardrun
