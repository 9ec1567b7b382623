// Named models.
#pragma once

#include <string>
#include <vector>

#include "models/gpt.h"

namespace shardrun {

std::vector<std::string> preset_names();

// UsageError lists the known names. `vocabulary` replaces the preset's where it is > 0.
GptConfig preset(const std::string& name, int64_t vocabulary = 0);

}  // namespace shardrun
