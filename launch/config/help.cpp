// --help, made from the schema.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <vector>

#include "launch/config/fields.h"

namespace shardrun {

using google::protobuf::FieldDescriptor;

std::string flags_help(std::span<const std::string_view> hidden) {
  std::vector<std::string> groups;
  std::map<std::string, std::string> text;
  const auto* schema = Config::descriptor();
  for (int i = 0; i < schema->field_count(); ++i) {
    const FieldDescriptor* field = schema->field(i);
    const FlagOptions& o = options_of(field);
    if (std::find(hidden.begin(), hidden.end(), o.group()) != hidden.end()) continue;
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
