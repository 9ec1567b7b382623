// One HTML page on a run, from its output folder: what ran, its final numbers, its curves. The page
// stands alone: no scripts, nothing from elsewhere, light or dark as the reader's system is. Called
// by `shardrun report` and, at the end, by `train`.
#pragma once

#include <string>

namespace shardrun {

// From `out`/metrics.jsonl, and config.textproto and env.json where they are there. NoInputError,
// DataError.
std::string report_page(const std::string& out);

// Writes it to `out`/report.html and returns that path. CannotCreateError, IoError.
std::string write_report(const std::string& out);

}  // namespace shardrun
