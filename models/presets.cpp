#include "models/presets.h"

namespace shardrun {
namespace {

struct Preset {
  const char* name;
  GptConfig config;
};

// gpt-nano is the model of nanoGPT's recipe for CPUs; the others are GPT-2's four sizes.
const Preset kPresets[] = {
    {"gpt-nano", {4, 4, 128, 64, 256, false, 0}},
    {"gpt2-124m", {12, 12, 768, 1024, 50257, true, 0}},
    {"gpt2-355m", {24, 16, 1024, 1024, 50257, true, 0}},
    {"gpt2-774m", {36, 20, 1280, 1024, 50257, true, 0}},
    {"gpt2-1558m", {48, 25, 1600, 1024, 50257, true, 0}},
};

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  return names;
}

GptConfig preset(const std::string& name, int64_t vocabulary) {
  for (const Preset& preset : kPresets) {
    if (name != preset.name) continue;
    GptConfig config = preset.config;
    if (vocabulary > 0) config.vocabulary = vocabulary;
    return config;
  }
  std::string known;
  for (const std::string& each : preset_names()) known += (known.empty() ? "" : ", ") + each;
  throw UsageError("--model: got '{}', wanted one of {}", name, known);
}

}  // namespace shardrun
