#include "launch/data/token_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>

#include "runtime/error.h"

namespace shardrun {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr int32_t kLlmcMagic = 20240520;
constexpr int64_t kLlmcHeader = 256 * 4;
constexpr char kMegatronMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr uint64_t kMegatronHeader = 34;

template <typename T>
T load(std::span<const std::byte> bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

}  // namespace

const char* format_name(TokenFormat format) {
  switch (format) {
    case TokenFormat::nanogpt:
      return "nanoGPT";
    case TokenFormat::llmc:
      return "llm.c";
    case TokenFormat::megatron:
      return "Megatron";
    case TokenFormat::text:
      return "text";
  }
  return "?";
}

const char* TokenFile::type_name() const {
  switch (type_) {
    case Type::u8:
      return "uint8";
    case Type::i8:
      return "int8";
    case Type::i16:
      return "int16";
    case Type::i32:
      return "int32";
    case Type::i64:
      return "int64";
    case Type::u16:
      return "uint16";
  }
  return "?";
}

TokenFile TokenFile::open(const std::string& path, const Tokenizer& tokenizer) {
  namespace fs = std::filesystem;
  const fs::path name(path);
  const bool is_bin = name.extension() == ".bin";
  TokenFile result;
  result.path_ = path;
  if (name.extension() == ".idx" ||
      (is_bin && fs::exists(fs::path(name).replace_extension(".idx")))) {
    result.path_ = fs::path(name).replace_extension(".bin").string();
    result.open_megatron(fs::path(name).replace_extension(".idx").string());
    return result;
  }
  if (!fs::exists(name) && fs::exists(path + ".idx") && fs::exists(path + ".bin")) {
    result.path_ = path + ".bin";
    result.open_megatron(path + ".idx");
    return result;
  }
  result.file_ = MappedFile(path);
  const auto bytes = result.file_.bytes();
  if (bytes.empty()) throw DataError("{}: got an empty file, wanted tokens or text", path);
  if (is_bin || (bytes.size() >= 4 && load<int32_t>(bytes, 0) == kLlmcMagic)) {
    result.open_binary();
    return result;
  }
  result.format_ = TokenFormat::text;
  if (tokenizer.is_bytes()) {
    result.payload_ = bytes;
    result.type_ = Type::u8;
    result.size_ = static_cast<int64_t>(bytes.size());
    return result;
  }
  result.encoded_ = tokenizer.encode({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  result.payload_ = std::as_bytes(std::span(result.encoded_));
  result.type_ = Type::i32;
  result.size_ = static_cast<int64_t>(result.encoded_.size());
  return result;
}

void TokenFile::open_binary() {
  const auto bytes = file_.bytes();
  const auto total = static_cast<int64_t>(bytes.size());
  type_ = Type::u16;
  if (total < 4 || load<int32_t>(bytes, 0) != kLlmcMagic) {
    format_ = TokenFormat::nanogpt;
    if (total % 2 != 0) {
      throw DataError("{}: got {} bytes, wanted an even number: uint16 tokens", path_, total);
    }
    payload_ = bytes;
    size_ = total / 2;
    return;
  }
  format_ = TokenFormat::llmc;
  if (total < kLlmcHeader) {
    throw DataError("{}: offset 0: got {} bytes, wanted an llm.c header of {}", path_, total,
                    kLlmcHeader);
  }
  const auto version = load<int32_t>(bytes, 4);
  const int64_t count = load<int32_t>(bytes, 8);
  if (version != 1) throw DataError("{}: offset 4: got version {}, wanted 1", path_, version);
  if (count <= 0) throw DataError("{}: offset 8: got {} tokens, wanted at least 1", path_, count);
  if (total != kLlmcHeader + 2 * count) {
    throw DataError("{}: offset 8: got {} bytes, wanted {} for {} tokens", path_, total,
                    kLlmcHeader + 2 * count, count);
  }
  payload_ = bytes.subspan(kLlmcHeader);
  payload_offset_ = kLlmcHeader;
  size_ = count;
}

void TokenFile::open_megatron(const std::string& index_path) {
  const MappedFile index_file(index_path);
  const auto index = index_file.bytes();
  if (index.size() < kMegatronHeader) {
    throw DataError("{}: offset 0: got {} bytes, wanted a header of {}", index_path, index.size(),
                    kMegatronHeader);
  }
  if (std::memcmp(index.data(), kMegatronMagic, sizeof(kMegatronMagic)) != 0) {
    throw DataError("{}: offset 0: wanted the magic MMIDIDX of a Megatron index", index_path);
  }
  const auto version = load<uint64_t>(index, 9);
  if (version != 1) throw DataError("{}: offset 9: got version {}, wanted 1", index_path, version);
  const auto code = load<uint8_t>(index, 17);
  int64_t width = 0;
  switch (code) {
    case 1:
      type_ = Type::u8, width = 1;
      break;
    case 2:
      type_ = Type::i8, width = 1;
      break;
    case 3:
      type_ = Type::i16, width = 2;
      break;
    case 4:
      type_ = Type::i32, width = 4;
      break;
    case 5:
      type_ = Type::i64, width = 8;
      break;
    case 8:
      type_ = Type::u16, width = 2;
      break;
    default:
      throw DataError("{}: offset 17: got type code {}, wanted whole numbers: 1 to 5 or 8",
                      index_path, code);
  }
  const auto sequences = load<uint64_t>(index, 18);
  const auto documents = load<uint64_t>(index, 26);
  // Divided, not multiplied: the counts are any 64 bits until compared with the size.
  const uint64_t rest = index.size() - kMegatronHeader;
  const bool fits =
      sequences <= rest / 12 && documents <= rest / 8 && rest == 12 * sequences + 8 * documents;
  if (!fits) {
    throw DataError(
        "{}: offset 18: got {} sequences and {} documents in {} bytes, wanted 12 bytes "
        "a sequence and 8 a document",
        index_path, sequences, documents, rest);
  }
  file_ = MappedFile(path_);
  const auto bytes = static_cast<int64_t>(file_.bytes().size());
  const uint64_t offsets = kMegatronHeader + 4 * sequences;
  int64_t expected = 0;
  for (uint64_t i = 0; i < sequences; ++i) {
    const uint64_t at = kMegatronHeader + 4 * i;
    const int64_t length = load<int32_t>(index, at);
    const auto offset = load<int64_t>(index, offsets + 8 * i);
    if (length < 0)
      throw DataError("{}: offset {}: got length {}, wanted >= 0", index_path, at, length);
    if (offset != expected) {
      throw DataError(
          "{}: offset {}: sequence {}: got byte offset {}, wanted {} (one after another)",
          index_path, offsets + 8 * i, i, offset, expected);
    }
    expected += length * width;
    if (expected > bytes) {
      throw DataError("{}: sequence {}: got an end at byte {}, wanted at most {}, the size of {}",
                      index_path, i, expected, bytes, path_);
    }
  }
  if (expected != bytes) {
    throw DataError("{}: got {} bytes, wanted {} as its index says", path_, bytes, expected);
  }
  if (bytes == 0) throw DataError("{}: got no tokens, wanted at least 1", path_);
  int64_t previous = 0;
  for (uint64_t i = 0; i < documents; ++i) {
    const uint64_t at = offsets + 8 * sequences + 8 * i;
    const auto start = load<int64_t>(index, at);
    if (start < previous || start > static_cast<int64_t>(sequences)) {
      throw DataError("{}: offset {}: got document start {}, wanted {} to {}", index_path, at,
                      start, previous, sequences);
    }
    previous = start;
  }
  format_ = TokenFormat::megatron;
  payload_ = file_.bytes();
  size_ = bytes / width;
  // The last entry closes the list.
  documents_ = documents > 0 ? static_cast<int64_t>(documents) - 1 : 0;
}

template <typename T>
void TokenFile::read_as(int64_t begin, std::span<int32_t> out, int64_t vocabulary) const {
  const auto limit = std::min<int64_t>(vocabulary, std::numeric_limits<int32_t>::max());
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t position = begin + static_cast<int64_t>(i);
    const auto token =
        static_cast<int64_t>(load<T>(payload_, static_cast<uint64_t>(position) * sizeof(T)));
    if (token < 0 || token >= limit) [[unlikely]] {
      if (format_ == TokenFormat::text) {
        throw DataError("{}: token {}: got {}, wanted 0 to {} (the vocabulary)", path_, position,
                        token, limit - 1);
      }
      throw DataError("{}: token {}, byte offset {}: got {}, wanted 0 to {} (the vocabulary)",
                      path_, position, payload_offset_ + position * static_cast<int64_t>(sizeof(T)),
                      token, limit - 1);
    }
    out[i] = static_cast<int32_t>(token);
  }
}

void TokenFile::read(int64_t begin, std::span<int32_t> out, int64_t vocabulary) const {
  SHARDRUN_CHECK(begin >= 0 && static_cast<int64_t>(out.size()) <= size_ - begin,
                 "{}: tokens {} .. {} of {}", path_, begin,
                 begin + static_cast<int64_t>(out.size()), size_);
  switch (type_) {
    case Type::u8:
      return read_as<uint8_t>(begin, out, vocabulary);
    case Type::i8:
      return read_as<int8_t>(begin, out, vocabulary);
    case Type::i16:
      return read_as<int16_t>(begin, out, vocabulary);
    case Type::i32:
      return read_as<int32_t>(begin, out, vocabulary);
    case Type::i64:
      return read_as<int64_t>(begin, out, vocabulary);
    case Type::u16:
      return read_as<uint16_t>(begin, out, vocabulary);
  }
}

TokenFileWriter::TokenFileWriter(std::string path)
    : path_(std::move(path)), unfinished_(fmt::format("{}.{}.tmp", path_, getpid())) {
  file_ = ::open(unfinished_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0)
    throw CannotCreateError("{}: cannot create: {}", unfinished_, std::strerror(errno));
  const std::array<int32_t, 256> header{};
  put(header.data(), sizeof(header));
}

TokenFileWriter::~TokenFileWriter() {
  if (file_ < 0) return;
  close(file_);
  unlink(unfinished_.c_str());
}

void TokenFileWriter::put(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(file_, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw IoError("{}: cannot write: {}", unfinished_, std::strerror(errno));
    at += done;
    bytes -= static_cast<size_t>(done);
  }
}

void TokenFileWriter::append(std::span<const int32_t> tokens) {
  std::vector<uint16_t> narrow;
  narrow.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] > 65535) {
      throw DataError("{}: token {}: got {}, wanted 0 to 65535", path_,
                      count_ + static_cast<int64_t>(i), tokens[i]);
    }
    narrow.push_back(static_cast<uint16_t>(tokens[i]));
  }
  const auto added = static_cast<int64_t>(tokens.size());
  if (added > std::numeric_limits<int32_t>::max() - count_) {
    throw DataError("{}: got {} tokens, wanted at most 2^31 - 1 in a file: split the text", path_,
                    count_ + added);
  }
  put(narrow.data(), narrow.size() * sizeof(uint16_t));
  count_ += added;
}

void TokenFileWriter::finish() {
  const std::array<int32_t, 3> header{kLlmcMagic, 1, static_cast<int32_t>(count_)};
  if (pwrite(file_, header.data(), sizeof(header), 0) != sizeof(header) || fsync(file_) != 0) {
    throw IoError("{}: cannot write: {}", unfinished_, std::strerror(errno));
  }
  if (std::rename(unfinished_.c_str(), path_.c_str()) != 0) {
    throw CannotCreateError("{}: cannot create: {}", path_, std::strerror(errno));
  }
  close(file_);
  file_ = -1;
}

}  // namespace shardrun
