// From a command line to a Config. Called by every subcommand before anything else; reads at most
// one file (CONFIG.textproto or CONFIG.json), never the environment. What flows out is the protobuf
// message of config.proto, checked field by field; what depends on the number of ranks is checked
// by resolve_batch, once that number is known.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/config/config.pb.h"

namespace shardrun {

struct CommandLine {
  Config config;  // fields given in the file or by a flag, in canonical values
  std::vector<std::string>
      operands;       // words that are neither a flag, its value, nor the config file
  bool help = false;  // --help or -h was given
};

// `words` is the command line after the subcommand. The first operand that ends in .textproto,
// .txtpb, .pbtxt or .json is the config file; flags override it wherever they stand, and the last
// of two equal flags wins. `-` and `_` are alike in names; `--flag value` and `--flag=value` too;
// `--` ends the flags. UsageError: unknown name (with the nearest right one), wrong type or value,
// features that are not built; NoInputError: the file is missing.
CommandLine parse_command_line(std::span<const std::string> words);

// The same for subcommands without operands: any is a UsageError.
Config parse_config(std::span<const std::string> words);

// File contents; `name` is for messages.
Config parse_textproto(std::string_view text, const std::string& name);
Config parse_json(std::string_view text, const std::string& name);

// Sets one field from text as a flag would; `name` may be an alias.
void set_field(Config& config, std::string_view name, const std::string& value);

// Checks that need more than one field. Throws UsageError, or DeviceError for a device that this
// build lacks. Called by parse_command_line.
void validate(const Config& config);

// --device as words: auto, cpu, cuda or cuda:N. UsageError for others.
struct DeviceChoice {
  bool automatic = false;  // CUDA if built and present
  bool cuda = false;
  std::optional<int> index = std::nullopt;  // cuda:N; else local rank modulo visible GPUs
};
DeviceChoice parse_device(const std::string& text);

// Leaves as they are in a step: `global_batch` sequences are `leaves` micro-batches, which `world`
// ranks compute in `micro_steps` rounds (the last round may leave ranks idle).
struct BatchPlan {
  int64_t micro_batch = 0;
  int64_t global_batch = 0;
  int64_t leaves = 0;
  int64_t micro_steps = 0;
};

// Without --global-batch it is micro_batch x grad_accum x world where --grad-accum is given, and 8
// micro-batches otherwise; --micro-batch never depends on `world`. ConfigError where the three
// numbers do not fit, showing the sum.
BatchPlan resolve_batch(const Config& config, int64_t world);

// `config` with every default of the schema filled in, so that a later change of a default does not
// change this run. Fields without a default stay absent.
Config with_defaults(const Config& config);

// One field a line, in schema order; parse_textproto reads it back to the same message.
std::string to_textproto(const Config& config);

// Flags by group with help, default, values and aliases; without the groups named in `hidden`.
std::string flags_help(std::span<const std::string_view> hidden = {});

// Seconds in "HH:MM:SS", "MM:SS" or "SS"; UsageError otherwise.
int64_t parse_duration(const std::string& text);

// The nearest of `candidates` by edit distance (insert, delete, replace, swap of neighbours).
std::string_view nearest_name(std::string_view name, std::span<const std::string> candidates);

}  // namespace shardrun
