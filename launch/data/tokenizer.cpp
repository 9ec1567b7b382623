#include "launch/data/tokenizer.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>

#include "launch/data/unicode.h"
#include "runtime/error.h"

namespace shardrun {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  int64_t vocabulary() const override { return 256; }
  bool is_bytes() const override { return true; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> tokens;
    tokens.reserve(text.size());
    for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] > 255) {
        throw DataError("token {}: got {}, wanted a byte", i, tokens[i]);
      }
      text.push_back(static_cast<char>(tokens[i]));
    }
    return text;
  }
};

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw NoInputError("{}: cannot open, wanted a tokenizer's file", path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// GPT-2 writes bytes as printable characters: those that are printable in Latin-1 as themselves,
// the others from U+0100 on, in order.
std::unordered_map<char32_t, char> printable_bytes() {
  std::unordered_map<char32_t, char> result;
  char32_t next = 0x100;
  for (char32_t b = 0; b < 256; ++b) {
    const bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    result[itself ? b : next++] = static_cast<char>(b);
  }
  return result;
}

class Gpt2Tokenizer final : public Tokenizer {
 public:
  explicit Gpt2Tokenizer(const std::string& dir) {
    // Hugging Face has the same two files under other names.
    const bool renamed = !std::ifstream(dir + "/encoder.json") && std::ifstream(dir + "/vocab.json");
    read_vocabulary(dir + (renamed ? "/vocab.json" : "/encoder.json"));
    read_merges(dir + (renamed ? "/merges.txt" : "/vocab.bpe"));
  }

  int64_t vocabulary() const override { return static_cast<int64_t>(bytes_.size()); }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> tokens;
    std::unordered_map<std::string_view, std::vector<int32_t>> seen;
    while (!text.empty()) {
      const std::string_view piece = text.substr(0, gpt2_piece(text));
      auto found = seen.find(piece);
      if (found == seen.end()) found = seen.emplace(piece, merge(piece)).first;
      tokens.insert(tokens.end(), found->second.begin(), found->second.end());
      text.remove_prefix(piece.size());
    }
    return tokens;
  }

  std::string decode(std::span<const int32_t> tokens) const override {
    std::string text;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= vocabulary()) {
        throw DataError("token {}: got {}, wanted a number below {}", i, tokens[i], vocabulary());
      }
      text += bytes_[static_cast<size_t>(tokens[i])];
    }
    return text;
  }

 private:
  struct Merge {
    int32_t rank = 0;
    int32_t token = 0;
  };

  static uint64_t pair_key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  void read_vocabulary(const std::string& path) {
    nlohmann::json object;
    try {
      object = nlohmann::json::parse(read_text(path));
    } catch (const nlohmann::json::exception& e) {
      throw DataError("{}: not JSON: {}", path, e.what());
    }
    if (!object.is_object() || object.empty()) {
      throw DataError("{}: got {}, wanted an object of tokens and numbers", path,
                      object.type_name());
    }
    const auto printable = printable_bytes();
    bytes_.resize(object.size());
    std::vector<bool> taken(object.size());
    for (const auto& [name, number] : object.items()) {
      const int64_t id = number.is_number_integer() ? number.get<int64_t>() : -1;
      if (id < 0 || id >= static_cast<int64_t>(taken.size()) || taken[static_cast<size_t>(id)]) {
        throw DataError("{}: token \"{}\": got {}, wanted each number below {} once", path, name,
                        number.dump(), taken.size());
      }
      taken[static_cast<size_t>(id)] = true;
      bytes_[static_cast<size_t>(id)] = to_bytes(name, printable);
      ids_[name] = static_cast<int32_t>(id);
    }
    for (const auto& [code, byte] : printable) {
      const auto found = std::find(bytes_.begin(), bytes_.end(), std::string(1, byte));
      if (found == bytes_.end()) {
        throw DataError("{}: no token for byte {}", path, static_cast<unsigned char>(byte));
      }
      byte_tokens_[static_cast<unsigned char>(byte)] = static_cast<int32_t>(found - bytes_.begin());
    }
  }

  // A name with another character is a marker such as <|endoftext|>: its text stands for it.
  static std::string to_bytes(std::string_view name,
                              const std::unordered_map<char32_t, char>& printable) {
    std::string bytes;
    for (std::string_view rest = name; !rest.empty();) {
      const Character c = next_character(rest);
      const auto found = printable.find(c.code);
      if (found == printable.end()) return std::string(name);
      bytes.push_back(found->second);
      rest.remove_prefix(c.bytes);
    }
    return bytes;
  }

  void read_merges(const std::string& path) {
    const std::string text = read_text(path);
    int32_t rank = 0;
    int64_t number = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      std::string line = text.substr(at, end - at);
      at = end + 1;
      ++number;
      if (line.ends_with('\r')) line.pop_back();
      if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
      const size_t space = line.find(' ');
      const std::string left = line.substr(0, space);
      const std::string right = space == std::string::npos ? "" : line.substr(space + 1);
      const auto a = ids_.find(left), b = ids_.find(right), both = ids_.find(left + right);
      if (a == ids_.end() || b == ids_.end() || both == ids_.end()) {
        throw DataError("{}: line {}: got \"{}\", wanted two tokens whose join is a token", path,
                        number, line);
      }
      merges_.emplace(pair_key(a->second, b->second), Merge{rank++, both->second});
    }
    if (merges_.empty()) throw DataError("{}: got no merges, wanted at least one", path);
  }

  // Merges the pair of lowest rank, leftmost first, until no pair has a rank. A queue instead of
  // passes: a piece may be as long as the text.
  std::vector<int32_t> merge(std::string_view piece) const {
    struct Node {
      int32_t token;
      int64_t previous, next;
    };
    struct Candidate {
      int32_t rank;
      int64_t left;
      int32_t left_token, right_token, token;
      bool operator>(const Candidate& o) const {
        return std::tie(rank, left) > std::tie(o.rank, o.left);
      }
    };
    const auto length = static_cast<int64_t>(piece.size());
    std::vector<Node> nodes;
    for (int64_t i = 0; i < length; ++i) {
      const auto byte = static_cast<unsigned char>(piece[static_cast<size_t>(i)]);
      nodes.push_back({byte_tokens_[byte], i - 1, i + 1 < length ? i + 1 : -1});
    }
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto consider = [&](int64_t left) {
      if (left < 0 || nodes[left].next < 0) return;
      const int32_t a = nodes[left].token, b = nodes[nodes[left].next].token;
      const auto found = merges_.find(pair_key(a, b));
      if (found != merges_.end()) {
        queue.push({found->second.rank, left, a, b, found->second.token});
      }
    };
    for (int64_t i = 0; i < length; ++i) consider(i);
    while (!queue.empty()) {
      const Candidate best = queue.top();
      queue.pop();
      Node& left = nodes[best.left];
      // Queued before one of the two was merged away.
      if (left.token != best.left_token || left.next < 0) continue;
      Node& right = nodes[left.next];
      if (right.token != best.right_token) continue;
      left.token = best.token;
      right.token = -1;
      left.next = right.next;
      if (left.next >= 0) nodes[left.next].previous = best.left;
      consider(left.previous);
      consider(best.left);
    }
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i >= 0 && i < length; i = nodes[i].next) tokens.push_back(nodes[i].token);
    return tokens;
  }

  std::vector<std::string> bytes_;  // by token
  std::array<int32_t, 256> byte_tokens_{};
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<uint64_t, Merge> merges_;
};

bool ascii_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  if (spec == "byte") return std::make_unique<ByteTokenizer>();
  if (spec.starts_with("gpt2:")) return std::make_unique<Gpt2Tokenizer>(spec.substr(5));
  throw UsageError("--tokenizer: got {}, wanted byte or gpt2:DIR", spec);
}

size_t gpt2_piece(std::string_view text) {
  for (std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.starts_with(ending)) return ending.size();
  }
  const auto class_at = [&](size_t at) {
    return character_class(next_character(text.substr(at)).code);
  };
  const size_t lead = text[0] == ' ' && text.size() > 1 && class_at(1) != CharacterClass::space;
  const CharacterClass kind = class_at(lead);
  size_t end = lead;
  size_t last = lead;  // where the last character of the run begins
  while (end < text.size() && class_at(end) == kind) {
    last = end;
    end += next_character(text.substr(end)).bytes;
  }
  // A run of whitespace before a word leaves its last character to the word.
  if (kind == CharacterClass::space && end < text.size() && last > 0) return last;
  return end;
}

size_t safe_cut(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text.size();
  const auto cuts = [&](size_t at) {
    const char before = text[at - 1];
    return ascii_space(text[at]) && static_cast<unsigned char>(before) < 0x80 &&
           !ascii_space(before);
  };
  for (size_t at = limit; at > 0; --at) {
    if (cuts(at)) return at;
  }
  for (size_t at = limit + 1; at < text.size(); ++at) {
    if (cuts(at)) return at;
  }
  return text.size();
}

}  // namespace shardrun
