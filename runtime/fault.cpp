#include "runtime/fault.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <vector>

#include "runtime/error.h"

namespace shardrun {
namespace {

const std::vector<std::string> kPhases{"open", "write", "sync", "rename", "commit", "step", "peer"};
// By FaultKind.
const std::vector<std::string> kKinds{"none",  "exit",  "abort",   "kill",       "stop",
                                      "throw", "delay", "nospace", "short-write"};

size_t choose(const std::string& key, const std::string& value,
              const std::vector<std::string>& choices) {
  const auto found = std::find(choices.begin(), choices.end(), value);
  if (found == choices.end()) {
    throw UsageError("SHARDRUN_FAULT: {}: got '{}', wanted one of {}", key, value,
                     fmt::join(choices, ", "));
  }
  return static_cast<size_t>(found - choices.begin());
}

template <typename T>
T number(const std::string& key, const std::string& value) {
  T result{};
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, result);
  if (error != std::errc() || stop != end || !(result >= 0)) {
    throw UsageError("SHARDRUN_FAULT: {}: got '{}', wanted a number >= 0", key, value);
  }
  return result;
}

}  // namespace

Fault Fault::parse(const std::string& text) {
  Fault fault;
  if (text.empty()) return fault;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const size_t cut = std::min(part.find('='), part.size());
    const std::string key = part.substr(0, cut);
    const std::string value = part.substr(std::min(cut + 1, part.size()));
    if (key == "rank") {
      fault.rank_ = number<int>(key, value);
    } else if (key == "step") {
      fault.step_ = number<int64_t>(key, value);
    } else if (key == "phase") {
      fault.phase_ = kPhases[choose(key, value, kPhases)];
    } else if (key == "kind") {
      fault.kind_ = static_cast<FaultKind>(choose(key, value, kKinds));
    } else if (key == "seconds") {
      fault.seconds_ = number<double>(key, value);
    } else {
      throw UsageError("SHARDRUN_FAULT: got '{}', wanted rank=, step=, phase=, kind=, seconds=",
                       part);
    }
  }
  if (fault.phase_.empty() || fault.empty()) {
    throw UsageError("SHARDRUN_FAULT: got '{}', wanted a phase and a kind at least", text);
  }
  return fault;
}

FaultKind Fault::at(const char* phase, int rank, int64_t step) const {
  if (empty() || phase_ != phase || (rank_ >= 0 && rank_ != rank) ||
      (step_ >= 0 && step_ != step)) {
    return FaultKind::none;
  }
  std::fprintf(stderr, "fault: rank %d, step %lld, phase %s: %s\n", rank,
               static_cast<long long>(step), phase, kKinds[static_cast<size_t>(kind_)].c_str());
  switch (kind_) {
    case FaultKind::exit:
      std::_Exit(1);
    case FaultKind::abort:
      std::abort();
    case FaultKind::kill:
      std::raise(SIGKILL);
      break;
    case FaultKind::stop:
      std::raise(SIGSTOP);
      break;
    case FaultKind::throw_error:
      throw InternalError("fault on demand in phase {}", phase);
    case FaultKind::delay:
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds_));
      break;
    case FaultKind::nospace:
    case FaultKind::short_write:
      return kind_;
    case FaultKind::none:
      break;
  }
  return FaultKind::none;
}

}  // namespace shardrun
