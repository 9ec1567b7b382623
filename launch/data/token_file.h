// A file seen as one long row of tokens, whatever its format. Opened by the training set-up and by
// `shardrun data`; read through Dataset. Files are mapped, never copied, except text that a
// tokenizer other than bytes has to encode. Every number read is checked against the vocabulary.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "launch/data/mapped_file.h"
#include "launch/data/tokenizer.h"

namespace shardrun {

enum class TokenFormat {
  nanogpt,   // raw little-endian uint16, no header
  llmc,      // 256 int32 header {20240520, 1, count}, then uint16
  megatron,  // PREFIX.bin with PREFIX.idx beside it
  text,      // through a tokenizer
};
const char* format_name(TokenFormat format);

class TokenFile {
 public:
  // The format follows from the file: PREFIX.idx (or PREFIX.bin with an index beside it, or PREFIX)
  // is Megatron's; the magic number is llm.c's; another *.bin is nanoGPT's; the rest is text.
  // NoInputError: missing; DataError: empty, cut short, or not what the header says.
  static TokenFile open(const std::string& path, const Tokenizer& tokenizer);

  int64_t size() const { return size_; }
  TokenFormat format() const { return format_; }
  const std::string& path() const { return path_; }
  const char* type_name() const;
  int64_t documents() const { return documents_; }  // 1 where the format has none

  // Tokens begin .. begin + out.size(). DataError for a token outside [0, vocabulary), with its
  // position and byte offset.
  void read(int64_t begin, std::span<int32_t> out, int64_t vocabulary) const;

 private:
  enum class Type { u8, i8, i16, i32, i64, u16 };

  void open_megatron(const std::string& index_path);
  void open_binary();
  template <typename T>
  void read_as(int64_t begin, std::span<int32_t> out, int64_t vocabulary) const;

  std::string path_;
  MappedFile file_;
  std::vector<int32_t> encoded_;        // text only
  std::span<const std::byte> payload_;  // the tokens, inside file_ or encoded_
  int64_t payload_offset_ = 0;          // of the payload in the file
  Type type_ = Type::u16;
  TokenFormat format_ = TokenFormat::nanogpt;
  int64_t size_ = 0;
  int64_t documents_ = 1;
};

// Writes an llm.c token file as it is fed; finish() puts the count in and moves the file to its
// name, so that a file that is there is whole. CannotCreateError, IoError; DataError for a token
// above 65535 or more tokens than the header's int32 can count.
class TokenFileWriter {
 public:
  explicit TokenFileWriter(std::string path);
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;
  ~TokenFileWriter();
  void append(std::span<const int32_t> tokens);
  void finish();
  int64_t count() const { return count_; }

 private:
  void put(const void* data, size_t bytes);

  std::string path_, unfinished_;
  int file_ = -1;
  int64_t count_ = 0;
};

}  // namespace shardrun
