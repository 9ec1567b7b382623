// Text to token numbers and back. Made from --tokenizer by whoever reads text: the data readers and
// `generate`. Decoding what was encoded gives the same bytes, whatever the bytes are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardrun {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Token numbers lie in [0, vocabulary()).
  virtual int64_t vocabulary() const = 0;
  // Markers such as <|endoftext|> are plain text here.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // DataError for a number outside the vocabulary, naming its position.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  // Whether a token is one byte of text, so that a file of text is a file of tokens.
  virtual bool is_bytes() const { return false; }
};

// "byte": the 256 byte values. "gpt2:DIR": byte-level BPE as published with GPT-2 (Radford et al.
// 2019), from DIR/encoder.json and DIR/vocab.bpe, or vocab.json and merges.txt. UsageError for another spec, NoInputError for
// missing files, DataError for files that do not fit together.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec);

// The pieces inside which GPT-2's merges work: its pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Returns the bytes of the first piece of a text that is not empty.
size_t gpt2_piece(std::string_view text);

// The end, at most `limit`, of a prefix of `text` that can be encoded apart from the rest: pieces
// always end before a whitespace that follows something else. text.size() where none is found.
size_t safe_cut(std::string_view text, size_t limit);

}  // namespace shardrun
