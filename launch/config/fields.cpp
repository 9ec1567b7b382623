#include "launch/config/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <vector>

#include "runtime/error.h"

namespace shardrun {

using google::protobuf::FieldDescriptor;

namespace {

// Spelling of a name inside tables: lower case with '-'.
std::string canonical_spelling(std::string_view name) {
  std::string result(name);
  for (char& c : result)
    c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

const std::map<std::string, FlagName>& names() {
  static const std::map<std::string, FlagName> table = [] {
    std::map<std::string, FlagName> result;
    const auto add = [&](const std::string& name, FlagName meaning) {
      SHARDRUN_CHECK(result.emplace(name, meaning).second, "two flags are named {}", name);
    };
    const auto* schema = Config::descriptor();
    for (int i = 0; i < schema->field_count(); ++i) {
      const FieldDescriptor* field = schema->field(i);
      add(canonical_spelling(field->name()), {field, ""});
      for (const std::string& alias : options_of(field).alias()) add(alias, {field, ""});
      for (const std::string& pair : options_of(field).shorthand()) {
        const auto [name, value] = split_pair(pair);
        add(name, {field, value});
      }
    }
    return result;
  }();
  return table;
}

// 1e-3, and 1_000_000 for those who count zeros.
std::optional<int64_t> parse_integer(std::string text) {
  std::erase(text, '_');
  if (const auto value = parse_number<int64_t>(text)) return value;
  const auto real = parse_number<double>(text);
  const bool exponent = text.find_first_of("eE") != std::string::npos;
  if (!exponent || !real || *real != std::floor(*real) || std::abs(*real) > 1e15)
    return std::nullopt;
  return static_cast<int64_t>(*real);
}

void check_refused(const FieldDescriptor* field, const std::string& shown,
                   const std::string& value) {
  if (options_of(field).has_not_built()) {
    throw UsageError("{}: {}", shown, options_of(field).not_built());
  }
  for (const std::string& pair : options_of(field).refused()) {
    const auto [refused, why] = split_pair(pair);
    if (canonical_spelling(refused) == canonical_spelling(value)) {
      throw UsageError("{}: got {}: {}", shown, value, why);
    }
  }
}

void check_range(const FieldDescriptor* field, const std::string& shown, double value) {
  const FlagOptions& o = options_of(field);
  const auto wrong = [&](std::string_view relation, double bound) {
    throw UsageError("{}: got {}, wanted a number {} {}", shown, value, relation, bound);
  };
  if (!std::isfinite(value)) throw UsageError("{}: got {}, wanted a finite number", shown, value);
  if (o.has_at_least() && !(value >= o.at_least())) wrong(">=", o.at_least());
  if (o.has_above() && !(value > o.above())) wrong(">", o.above());
  if (o.has_at_most() && !(value <= o.at_most())) wrong("<=", o.at_most());
  if (o.has_below() && !(value < o.below())) wrong("<", o.below());
}

void check_choice(const FieldDescriptor* field, const std::string& shown,
                  const std::string& value) {
  const auto& choices = options_of(field).choice();
  if (choices.empty() || std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::vector<std::string> candidates(choices.begin(), choices.end());
  for (const std::string& pair : options_of(field).value_alias()) {
    candidates.push_back(split_pair(pair).first);
  }
  const std::string near(nearest_name(canonical_spelling(value), candidates));
  throw UsageError("{}: got {}, wanted one of {} (the nearest is {})", shown, value,
                   fmt::join(choices, ", "), meant(field, near));
}

}  // namespace

const FlagOptions& options_of(const FieldDescriptor* field) {
  return field->options().GetExtension(flag);
}

std::string flag_name(const FieldDescriptor* field) {
  return "--" + canonical_spelling(field->name());
}

std::pair<std::string, std::string> split_pair(const std::string& pair) {
  const size_t at = pair.find('=');
  return {pair.substr(0, at), pair.substr(at + 1)};
}

std::string nearest_flag(std::string_view name) {
  std::vector<std::string> candidates{"help"};
  for (const auto& [candidate, meaning] : names()) candidates.push_back(candidate);
  return std::string(nearest_name(canonical_spelling(name), candidates));
}

const FlagName* find_name(std::string_view name) {
  const auto found = names().find(canonical_spelling(name));
  return found == names().end() ? nullptr : &found->second;
}

std::optional<bool> parse_bool(std::string_view text) {
  const std::string word = canonical_spelling(text);
  if (word == "true" || word == "1" || word == "yes" || word == "on") return true;
  if (word == "false" || word == "0" || word == "no" || word == "off") return false;
  return std::nullopt;
}

std::string meant(const FieldDescriptor* field, const std::string& value) {
  for (const std::string& pair : options_of(field).value_alias()) {
    const auto [written, canonical] = split_pair(pair);
    if (canonical_spelling(written) == canonical_spelling(value)) return canonical;
  }
  for (const std::string& choice : options_of(field).choice()) {
    if (canonical_spelling(choice) == canonical_spelling(value)) return choice;
  }
  return value;
}

bool is_refused(const FieldDescriptor* field, const std::string& value) {
  const auto& refused = options_of(field).refused();
  return std::any_of(refused.begin(), refused.end(), [&](const std::string& pair) {
    return canonical_spelling(split_pair(pair).first) == canonical_spelling(value);
  });
}

void set_value(Config& config, const FieldDescriptor* field, const std::string& shown,
               const std::string& written) {
  check_refused(field, shown, written);
  const std::string value = meant(field, written);
  const auto* access = config.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      check_choice(field, shown, value);
      access->SetString(&config, field, value);
      return;
    case FieldDescriptor::CPPTYPE_BOOL: {
      const auto flagged = parse_bool(value);
      if (!flagged) throw UsageError("{}: got {}, wanted true or false", shown, written);
      access->SetBool(&config, field, *flagged);
      return;
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const auto number = parse_integer(value);
      if (!number) throw UsageError("{}: got {}, wanted a whole number", shown, written);
      check_range(field, shown, static_cast<double>(*number));
      access->SetInt64(&config, field, *number);
      return;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const auto number = parse_number<double>(value);
      if (!number) throw UsageError("{}: got {}, wanted a number", shown, written);
      check_range(field, shown, *number);
      access->SetDouble(&config, field, *number);
      return;
    }
    default:
      throw InternalError("{}: a type that is no flag", field->full_name());
  }
}

std::string value_text(const Config& config, const FieldDescriptor* field) {
  const auto* access = config.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return access->GetString(config, field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return access->GetBool(config, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_INT64:
      return fmt::to_string(access->GetInt64(config, field));
    default:
      return fmt::to_string(access->GetDouble(config, field));
  }
}

void apply_flag(Config& config, const FlagName& name, const std::string& shown,
                const std::string& value) {
  if (name.shorthand.empty()) return set_value(config, name.field, shown, value);
  const auto on = parse_bool(value);
  if (!on) throw UsageError("{}: got {}, wanted true or false", shown, value);
  if (*on) set_value(config, name.field, shown, name.shorthand);
}

std::string_view nearest_name(std::string_view name, std::span<const std::string> candidates) {
  const auto distance = [](std::string_view a, std::string_view b) {
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
    for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      for (size_t j = 1; j <= b.size(); ++j) {
        d[i][j] =
            std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
        if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
          d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
      }
    }
    return d[a.size()][b.size()];
  };
  // A word pasted in by mistake can be long; no flag is.
  name = name.substr(0, 64);
  std::string_view best;
  size_t best_distance = SIZE_MAX;
  for (const std::string& candidate : candidates) {
    const size_t d = distance(name, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

}  // namespace shardrun
