#include "launch/data/data_command.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>

#include "launch/config/config.h"
#include "launch/data/mapped_file.h"
#include "launch/data/token_file.h"
#include "launch/data/tokenizer.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

constexpr size_t kPiece = size_t{1} << 20;

// Text goes through in pieces: a corpus may be larger than memory.
void encode(const Config& config, const std::string& path, const Tokenizer& tokenizer,
            std::ostream& out) {
  if (config.out().empty()) throw UsageError("--out: wanted the token file to write");
  const MappedFile file(path);
  std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (text.empty()) throw DataError("{}: got an empty file, wanted text", path);
  const size_t size = text.size();
  TokenFileWriter writer(config.out());
  while (!text.empty()) {
    const size_t cut = safe_cut(text, kPiece);
    writer.append(tokenizer.encode(text.substr(0, cut)));
    text.remove_prefix(cut);
  }
  writer.finish();
  if (config.json()) {
    out << nlohmann::json({{"file", config.out()}, {"tokens", writer.count()}, {"bytes", size}})
        << '\n';
    return;
  }
  out << fmt::format("{}: {} tokens from {} bytes of {}\n", config.out(), writer.count(), size,
                     path);
}

struct Range {
  int64_t lowest = std::numeric_limits<int64_t>::max();
  int64_t highest = -1;
};

// Reads every token, which checks it.
Range scan(const TokenFile& file, int64_t vocabulary) {
  Range range;
  std::vector<int32_t> block(1 << 16);
  for (int64_t at = 0; at < file.size(); at += static_cast<int64_t>(block.size())) {
    const auto count = std::min<int64_t>(static_cast<int64_t>(block.size()), file.size() - at);
    const std::span<int32_t> part(block.data(), static_cast<size_t>(count));
    file.read(at, part, vocabulary);
    const auto [low, high] = std::minmax_element(part.begin(), part.end());
    range.lowest = std::min<int64_t>(range.lowest, *low);
    range.highest = std::max<int64_t>(range.highest, *high);
  }
  return range;
}

std::string first_text(const TokenFile& file, const Tokenizer& tokenizer) {
  std::vector<int32_t> first(static_cast<size_t>(std::min<int64_t>(file.size(), 32)));
  file.read(0, first, tokenizer.vocabulary());
  return tokenizer.decode(first);
}

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void inspect(const Config& config, const std::string& path, const Tokenizer& tokenizer,
             std::ostream& out) {
  const TokenFile file = TokenFile::open(path, tokenizer);
  const Range range = scan(file, std::numeric_limits<int32_t>::max());
  // Decoded only where the tokens can be this tokenizer's.
  const bool ours = range.highest < tokenizer.vocabulary();
  const std::string begins = ours ? first_text(file, tokenizer) : "";
  if (config.json()) {
    nlohmann::json object = {
        {"file", file.path()},           {"format", format_name(file.format())},
        {"type", file.type_name()},      {"tokens", file.size()},
        {"documents", file.documents()}, {"lowest", range.lowest},
        {"highest", range.highest}};
    if (ours) object["begins"] = begins;
    out << object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    return;
  }
  out << fmt::format("{}: {}, {} tokens of {}, {} document{}, numbers {} to {}\n", file.path(),
                     format_name(file.format()), file.size(), file.type_name(), file.documents(),
                     file.documents() == 1 ? "" : "s", range.lowest, range.highest);
  if (ours) out << fmt::format("begins with {}\n", quoted(begins));
}

void check(const Config& config, const std::string& path, const Tokenizer& tokenizer,
           std::ostream& out) {
  const TokenFile file = TokenFile::open(path, tokenizer);
  // With neither given, a token file is held against what GPT-2's tokenizer can write.
  const bool by_tokenizer = config.has_tokenizer() || file.format() == TokenFormat::text;
  const int64_t vocabulary = config.has_vocab() ? config.vocab()
                             : by_tokenizer     ? tokenizer.vocabulary()
                                                : 50257;
  scan(file, vocabulary);
  out << fmt::format("{}: {} tokens, all below {}\n", file.path(), file.size(), vocabulary);
}

}  // namespace

void data_command(std::span<const std::string> words, std::ostream& out) {
  CommandLine line = parse_command_line(words);
  if (line.help) {
    out << "usage: shardrun data [encode] TEXT --out FILE.bin [--tokenizer T]\n"
           "           writes the text's tokens\n"
           "       shardrun data inspect FILE [--tokenizer T] [--json]\n"
           "           format, counts, first tokens\n"
           "       shardrun data check FILE [--vocab N | --tokenizer T]\n"
           "           is every token in the vocabulary\n";
    return;
  }
  std::vector<std::string>& operands = line.operands;
  std::string verb = "encode";
  if (!operands.empty() &&
      (operands[0] == "encode" || operands[0] == "inspect" || operands[0] == "check")) {
    verb = operands[0];
    operands.erase(operands.begin());
  }
  if (operands.empty() && line.config.has_data()) operands.push_back(line.config.data());
  if (operands.size() != 1) {
    throw UsageError("data {}: got {} files, wanted one: data [encode|inspect|check] FILE", verb,
                     operands.size());
  }
  const auto tokenizer = make_tokenizer(line.config.tokenizer());
  if (verb == "encode") return encode(line.config, operands[0], *tokenizer, out);
  if (verb == "inspect") return inspect(line.config, operands[0], *tokenizer, out);
  check(line.config, operands[0], *tokenizer, out);
}

}  // namespace shardrun
