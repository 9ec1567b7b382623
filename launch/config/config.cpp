#include "launch/config/config.h"

#include <fmt/format.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "launch/config/fields.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

using google::protobuf::FieldDescriptor;

std::string read_file(const std::string& path) {
  if (std::filesystem::is_directory(path))
    throw NoInputError("{}: is a folder, wanted a file", path);
  std::ifstream in(path, std::ios::binary);
  if (!in) throw NoInputError("{}: cannot open the config file", path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

bool is_config_file(std::string_view word) {
  for (std::string_view end : {".textproto", ".txtpb", ".pbtxt", ".json"}) {
    if (word.ends_with(end)) return true;
  }
  return false;
}

// Keeps the first error of the text parser.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (!message_.empty()) return;
    line_ = line;
    column_ = column;
    message_ = message;
  }
  int line_ = 0;
  int column_ = 0;
  std::string message_;
};

// The value of a flag that has no "=value": the next word, or what the flag means when it stands
// alone. `next` is empty where there is no next word.
std::string detached_value(const FlagName& name, const std::string& shown,
                           const std::optional<std::string>& next, bool& taken) {
  const bool value_follows = next && !next->starts_with("--");
  taken = false;
  if (!name.shorthand.empty() || name.field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    taken = value_follows && parse_bool(*next).has_value();
    return taken ? *next : "true";
  }
  taken = value_follows;
  if (taken) return *next;
  if (options_of(name.field).has_implied()) return options_of(name.field).implied();
  throw UsageError(
      "{}: wanted a value{}", shown,
      next ? fmt::format(", got {} (write {}={} if that is it)", *next, shown, *next) : "");
}

void parse_file(Config& config, const std::string& path) {
  const std::string text = read_file(path);
  config = path.ends_with(".json") ? parse_json(text, path) : parse_textproto(text, path);
}

}  // namespace

void set_field(Config& config, std::string_view name, const std::string& value) {
  const FlagName* found = find_name(name);
  if (!found) throw UsageError("{}: no such field; the nearest is {}", name, nearest_flag(name));
  apply_flag(config, *found, std::string(name), value);
}

Config parse_textproto(std::string_view text, const std::string& name) {
  google::protobuf::TextFormat::Parser parser;
  FirstError error;
  parser.RecordErrorsTo(&error);
  Config parsed;
  if (!parser.ParseFromString(std::string(text), &parsed)) {
    const std::string place = fmt::format("{}:{}:{}", name, error.line_ + 1, error.column_ + 1);
    const std::string_view unknown = "no field named \"";
    const size_t at = error.message_.find(unknown);
    if (at == std::string::npos) throw UsageError("{}: {}", place, error.message_);
    const size_t begin = at + unknown.size();
    const std::string field = error.message_.substr(begin, error.message_.find('"', begin) - begin);
    throw UsageError("{}: no field {}; the nearest is {}", place, field,
                     find_name(nearest_flag(field)) ? find_name(nearest_flag(field))->field->name()
                                                    : "in --help");
  }
  // Once more through the one door, for aliases of values and for ranges.
  Config config;
  std::vector<const FieldDescriptor*> fields;
  parsed.GetReflection()->ListFields(parsed, &fields);
  for (const FieldDescriptor* field : fields) {
    set_value(config, field, fmt::format("{}: {}", name, field->name()), value_text(parsed, field));
  }
  return config;
}

Config parse_json(std::string_view text, const std::string& name) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& e) {
    throw UsageError("{}: not JSON: {}", name, e.what());
  }
  if (!object.is_object())
    throw UsageError("{}: got {}, wanted an object", name, object.type_name());
  Config config;
  for (const auto& [key, value] : object.items()) {
    const std::string shown = fmt::format("{}: {}", name, key);
    const FlagName* found = find_name(key);
    if (!found) throw UsageError("{}: no such field; the nearest is {}", shown, nearest_flag(key));
    const FieldDescriptor* field = found->field;
    const bool is_string = field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    const bool is_bool =
        field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL || !found->shorthand.empty();
    // Beside its own type a field takes the names of its values: zero "full-shard", precision 16.
    const std::string text_value = value.is_string() ? value.get<std::string>() : value.dump();
    const bool named = (value.is_string() || value.is_number()) &&
                       (meant(field, text_value) != text_value || is_refused(field, text_value));
    const bool fits = is_bool     ? value.is_boolean()
                      : is_string ? value.is_string() || named
                                  : value.is_number() || named;
    if (!fits) {
      throw UsageError("{}: got {}, wanted {}", shown, value.dump(),
                       is_bool     ? "true or false"
                       : is_string ? "a string"
                                   : "a number");
    }
    apply_flag(config, *found, shown, text_value);
  }
  return config;
}

CommandLine parse_command_line(std::span<const std::string> words) {
  struct Given {
    FlagName name;
    std::string shown, value;
  };
  CommandLine line;
  std::vector<Given> flags;
  bool have_file = false;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") {
      line.operands.insert(line.operands.end(), words.begin() + i + 1, words.end());
      break;
    }
    if (word == "--help" || word == "-h") {
      line.help = true;
      continue;
    }
    if (!word.starts_with('-') || word == "-") {
      if (!have_file && is_config_file(word)) {
        parse_file(line.config, word);
        have_file = true;
      } else {
        line.operands.push_back(word);
      }
      continue;
    }
    const size_t equals = word.find('=');
    const std::string shown = word.substr(0, equals);
    const FlagName* name = word.starts_with("--") ? find_name(shown.substr(2)) : nullptr;
    if (!name) {
      const std::string bare = shown.substr(std::min(shown.find_first_not_of('-'), shown.size()));
      throw UsageError("{}: no such flag; the nearest is --{}", shown, nearest_flag(bare));
    }
    std::string value;
    if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else {
      std::optional<std::string> next;
      if (i + 1 < words.size()) next = words[i + 1];
      bool taken = false;
      value = detached_value(*name, shown, next, taken);
      i += taken;
    }
    flags.push_back({*name, shown, value});
  }
  for (const Given& given : flags) apply_flag(line.config, given.name, given.shown, given.value);
  validate(line.config);
  return line;
}

Config parse_config(std::span<const std::string> words) {
  CommandLine line = parse_command_line(words);
  if (!line.operands.empty()) {
    throw UsageError("got {}, wanted flags and at most one config file (*.textproto, *.json)",
                     line.operands.front());
  }
  return line.config;
}

Config with_defaults(const Config& config) {
  Config filled = config;
  const auto* schema = Config::descriptor();
  const auto* access = filled.GetReflection();
  for (int i = 0; i < schema->field_count(); ++i) {
    const FieldDescriptor* field = schema->field(i);
    // A feature that is not built refuses to be mentioned, also by the file written here.
    if (!field->has_default_value() || access->HasField(filled, field)) continue;
    if (options_of(field).has_not_built()) continue;
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        access->SetString(&filled, field, field->default_value_string());
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        access->SetBool(&filled, field, field->default_value_bool());
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        access->SetInt64(&filled, field, field->default_value_int64());
        break;
      default:
        access->SetDouble(&filled, field, field->default_value_double());
    }
  }
  return filled;
}

std::string to_textproto(const Config& config) {
  std::string text;
  SHARDRUN_CHECK(google::protobuf::TextFormat::PrintToString(config, &text), "config not printed");
  return text;
}

}  // namespace shardrun
