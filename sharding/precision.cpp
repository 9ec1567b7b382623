#include "sharding/precision.h"

#include "runtime/error.h"

namespace shardrun {

static constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "bf16-true"};

const char* name_of(Precision precision) { return kNames[static_cast<int>(precision)]; }

Precision precision_from_name(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) return static_cast<Precision>(i);
  }
  throw UsageError("--precision: got '{}', wanted fp32, bf16, fp16 or bf16-true", name);
}

static bool matches(const char* pattern, const char* name) {
  if (*pattern == '\0') return *name == '\0';
  if (*pattern == '*') return matches(pattern + 1, name) || (*name && matches(pattern, name + 1));
  return *pattern == *name && matches(pattern + 1, name + 1);
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  for (const std::string& pattern : patterns) {
    if (matches(pattern.c_str(), name.c_str())) return true;
  }
  return false;
}

}  // namespace shardrun
