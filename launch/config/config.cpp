#include "launch/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "runtime/error.h"

namespace shardrun {
namespace {

using google::protobuf::FieldDescriptor;

// What a name on the command line stands for.
struct Name {
  const FieldDescriptor* field = nullptr;
  std::string shorthand;  // not empty: the name alone means this value
};

// Spelling of a name inside tables: lower case with '-'.
std::string canonical_spelling(std::string_view name) {
  std::string result(name);
  for (char& c : result) c = c == '_' ? '-' : static_cast<char>(std::tolower(c));
  return result;
}

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

const std::map<std::string, Name>& names() {
  static const std::map<std::string, Name> table = [] {
    std::map<std::string, Name> result;
    const auto add = [&](const std::string& name, Name meaning) {
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

std::string nearest_flag(std::string_view name) {
  std::vector<std::string> candidates{"help"};
  for (const auto& [candidate, meaning] : names()) candidates.push_back(candidate);
  return std::string(nearest_name(canonical_spelling(name), candidates));
}

const Name* find_name(std::string_view name) {
  const auto found = names().find(canonical_spelling(name));
  return found == names().end() ? nullptr : &found->second;
}

std::optional<bool> parse_bool(std::string_view text) {
  const std::string word = canonical_spelling(text);
  if (word == "true" || word == "1" || word == "yes" || word == "on") return true;
  if (word == "false" || word == "0" || word == "no" || word == "off") return false;
  return std::nullopt;
}

template <typename T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (begin == end || error != std::errc() || stop != end) return std::nullopt;
  return value;
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

// The one way into a field: flags, JSON and textproto all end here. `shown` is the name as written.
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
std::string detached_value(const Name& name, const std::string& shown,
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

void apply_flag(Config& config, const Name& name, const std::string& shown,
                const std::string& value) {
  if (name.shorthand.empty()) return set_value(config, name.field, shown, value);
  const auto on = parse_bool(value);
  if (!on) throw UsageError("{}: got {}, wanted true or false", shown, value);
  if (*on) set_value(config, name.field, shown, name.shorthand);
}

void parse_file(Config& config, const std::string& path) {
  const std::string text = read_file(path);
  config = path.ends_with(".json") ? parse_json(text, path) : parse_textproto(text, path);
}

void check_policy(const std::string& policy) {
  static const std::vector<std::string> known{"default", "torch", "deepspeed", "megatron",
                                              "keras",   "apex",  "static"};
  if (std::find(known.begin(), known.end(), policy) != known.end()) return;
  if (policy.starts_with("static:")) {
    const auto scale = parse_number<double>(policy.substr(7));
    if (scale && *scale > 0 && std::isfinite(*scale)) return;
    throw UsageError("--loss-scale-policy: got {}, wanted static:S with a number S > 0", policy);
  }
  throw UsageError("--loss-scale-policy: got {}, wanted one of {} or static:S (the nearest is {})",
                   policy, fmt::join(known, ", "), nearest_name(policy, known));
}

void check_comm(const Config& config) {
  static const std::vector<std::string> known{"auto", "thread:N", "mpi", "shm", "nccl"};
  const std::string& comm = config.comm();
  if (comm == "auto" || comm == "mpi" || comm == "shm") return;
  if (comm == "nccl") throw DeviceError("--comm: got nccl, this build has no NCCL");
  if (comm.starts_with("thread:")) {
    const auto ranks = parse_number<int64_t>(comm.substr(7));
    if (ranks && *ranks >= 1 && *ranks <= 4096) return;
    throw UsageError("--comm: got {}, wanted thread:N with 1 <= N <= 4096", comm);
  }
  throw UsageError("--comm: got {}, wanted one of {} (the nearest is {})", comm,
                   fmt::join(known, ", "), nearest_name(comm, known));
}

void check_init_from(const std::string& path) {
  namespace fs = std::filesystem;
  if (path.starts_with("hf:") || fs::exists(fs::path(path) / "config.json") ||
      fs::exists(fs::path(path) / "model.safetensors") ||
      fs::exists(fs::path(path) / "pytorch_model.bin")) {
    throw UsageError(
        "--init-from: {} is a Hugging Face folder; reading these is not built yet, "
        "wanted a checkpoint of this program",
        path);
  }
}

}  // namespace

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

int64_t parse_duration(const std::string& text) {
  std::vector<int64_t> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ':');) {
    const auto number = parse_number<int64_t>(part);
    const bool digits = !part.empty() && std::all_of(part.begin(), part.end(), ::isdigit);
    const bool fits = number && (parts.empty() ? *number < 1'000'000'000 : *number < 60);
    if (!digits || !fits || parts.size() == 3)
      parts.assign(4, 0);
    else
      parts.push_back(*number);
  }
  if (parts.empty() || parts.size() > 3 || text.ends_with(':')) {
    throw UsageError("--max-time: got {}, wanted HH:MM:SS", text);
  }
  int64_t seconds = 0;
  for (int64_t part : parts) seconds = seconds * 60 + part;
  return seconds;
}

void set_field(Config& config, std::string_view name, const std::string& value) {
  const Name* found = find_name(name);
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
    const Name* found = find_name(key);
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
    Name name;
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
    const Name* name = word.starts_with("--") ? find_name(shown.substr(2)) : nullptr;
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

void validate(const Config& config) {
  if (config.device() == "cuda") throw DeviceError("--device: got cuda, this build has no CUDA");
  check_comm(config);
  const std::string& tokenizer = config.tokenizer();
  if (tokenizer.starts_with("sp:") || tokenizer.starts_with("hf:")) {
    throw UsageError("--tokenizer: got {}; reading these is not built yet, wanted byte or gpt2:DIR",
                     tokenizer);
  }
  if (tokenizer != "byte" && !(tokenizer.starts_with("gpt2:") && tokenizer.size() > 5)) {
    throw UsageError("--tokenizer: got {}, wanted byte or gpt2:DIR", tokenizer);
  }
  if (config.has_max_time()) parse_duration(config.max_time());
  if (config.has_init_from()) check_init_from(config.init_from());
  if (config.has_loss_scale_policy()) check_policy(config.loss_scale_policy());
  if (config.loss_scale_policy() == "static" && !config.has_loss_scale()) {
    throw UsageError(
        "--loss-scale-policy: got static without a scale, wanted static:S or --loss-scale S");
  }
  if (config.has_loss_scale() && config.has_loss_scale_policy() &&
      config.loss_scale_policy() != "static") {
    throw UsageError("--loss-scale: got {} beside --loss-scale-policy {}, wanted one of the two",
                     config.loss_scale(), config.loss_scale_policy());
  }
  if (config.recompute() != "none" && config.recompute() != "unit") {
    const auto every = parse_number<int64_t>(config.recompute());
    if (!every || *every < 1) {
      throw UsageError("--recompute: got {}, wanted none, unit or a whole number >= 1",
                       config.recompute());
    }
  }
  if (config.has_min_lr() && config.min_lr() > config.lr()) {
    throw UsageError("--min-lr: got {}, wanted at most --lr, which is {}", config.min_lr(),
                     config.lr());
  }
  if (config.has_global_batch() && config.has_micro_batch() &&
      config.global_batch() % config.micro_batch() != 0) {
    throw ConfigError(
        "--global-batch: got {}, wanted a multiple of --micro-batch: {} = {} x {} + {}",
        config.global_batch(), config.global_batch(), config.global_batch() / config.micro_batch(),
        config.micro_batch(), config.global_batch() % config.micro_batch());
  }
}

BatchPlan resolve_batch(const Config& config, int64_t world) {
  SHARDRUN_CHECK(world >= 1, "world is {}", world);
  constexpr int64_t kLeaves = 8;
  BatchPlan plan;
  plan.micro_batch = config.has_micro_batch() ? config.micro_batch() : 8;
  if (!config.has_micro_batch() && config.has_global_batch()) {
    while (config.global_batch() % plan.micro_batch != 0) --plan.micro_batch;
  }
  if (config.has_global_batch()) {
    plan.global_batch = config.global_batch();
  } else {
    const __int128 product =
        static_cast<__int128>(plan.micro_batch) *
        (config.has_grad_accum() ? static_cast<__int128>(config.grad_accum()) * world : kLeaves);
    if (product > INT64_MAX) throw ConfigError("--micro-batch: the global batch overflows");
    plan.global_batch = static_cast<int64_t>(product);
  }
  if (plan.global_batch % plan.micro_batch != 0) {
    throw ConfigError("--global-batch: got {}, wanted a multiple of --micro-batch {}",
                      plan.global_batch, plan.micro_batch);
  }
  plan.leaves = plan.global_batch / plan.micro_batch;
  plan.micro_steps = (plan.leaves + world - 1) / world;
  if (config.has_grad_accum() && config.grad_accum() != plan.micro_steps) {
    throw ConfigError(
        "--grad-accum: got micro-batch {} x grad-accum {} x {} ranks = {}, wanted global-batch {}: "
        "grad-accum {}, or leave it out",
        plan.micro_batch, config.grad_accum(), world,
        plan.micro_batch * config.grad_accum() * world, plan.global_batch, plan.micro_steps);
  }
  return plan;
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

std::string flags_help() {
  std::vector<std::string> groups;
  std::map<std::string, std::string> text;
  const auto* schema = Config::descriptor();
  for (int i = 0; i < schema->field_count(); ++i) {
    const FieldDescriptor* field = schema->field(i);
    const FlagOptions& o = options_of(field);
    if (!text.contains(o.group())) groups.push_back(o.group());
    std::string value = o.value();
    if (value.empty() && !o.choice().empty()) value = fmt::format("{}", fmt::join(o.choice(), "|"));
    if (value.empty()) {
      value = field->cpp_type() == FieldDescriptor::CPPTYPE_STRING   ? "TEXT"
              : field->cpp_type() == FieldDescriptor::CPPTYPE_INT64  ? "N"
              : field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE ? "X"
                                                                     : "[true|false]";
    }
    std::string& out = text[o.group()];
    out += fmt::format("  {} {}\n      {}", flag_name(field), value, o.help());
    if (field->has_default_value()) {
      const std::string shown = value_text(Config::default_instance(), field);
      out += fmt::format(" [{}]", shown == "\n" ? "a newline" : shown);
    }
    out += '\n';
    std::vector<std::string> also;
    for (const std::string& alias : o.alias()) also.push_back("--" + alias);
    for (const std::string& pair : o.shorthand()) also.push_back("--" + split_pair(pair).first);
    if (!also.empty()) out += fmt::format("      also {}\n", fmt::join(also, ", "));
    if (o.has_not_built()) out += "      (not built yet)\n";
  }
  std::string help = "  --help\n      print this\n";
  for (const std::string& group : groups) help += fmt::format("\n{}:\n{}", group, text[group]);
  return help;
}

}  // namespace shardrun
