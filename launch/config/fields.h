// The fields of a Config as the command line sees them: their names, and the one way into each.
// Called by the parsers, checks and help of this folder; nobody else includes it.
#pragma once

#include <google/protobuf/descriptor.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "launch/config/config.h"

namespace shardrun {

// What a name on the command line stands for.
struct FlagName {
  const google::protobuf::FieldDescriptor* field = nullptr;
  std::string shorthand;  // not empty: the name alone means this value
};

// By canonical name, alias or shorthand, `-` and `_` alike; null where there is none.
const FlagName* find_name(std::string_view name);

// The nearest of all names.
std::string nearest_flag(std::string_view name);

const FlagOptions& options_of(const google::protobuf::FieldDescriptor* field);

// "--micro-batch".
std::string flag_name(const google::protobuf::FieldDescriptor* field);

// "written=meant" cut at its first '='.
std::pair<std::string, std::string> split_pair(const std::string& pair);

std::optional<bool> parse_bool(std::string_view text);

// The canonical value that `value` is an alias of, or `value`.
std::string meant(const google::protobuf::FieldDescriptor* field, const std::string& value);

// Whether the value has an error of its own.
bool is_refused(const google::protobuf::FieldDescriptor* field, const std::string& value);

// Flags, JSON and textproto all end here. `shown` is the name as written, for messages.
void set_value(Config& config, const google::protobuf::FieldDescriptor* field,
               const std::string& shown, const std::string& written);

// A flag or shorthand with its value.
void apply_flag(Config& config, const FlagName& name, const std::string& shown,
                const std::string& value);

// The value as set_value takes it.
std::string value_text(const Config& config, const google::protobuf::FieldDescriptor* field);

template <typename T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (begin == end || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

}  // namespace shardrun
