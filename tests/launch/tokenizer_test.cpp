// Tokenizers: GPT-2's splitting rules on tricky text, merges on a tiny vocabulary made here, and,
// where SHARDRUN_TEST_GPT2_BPE names a folder with the published files, the published encodings.
#include "launch/data/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "launch/data/unicode.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

std::string utf8(char32_t c) {
  if (c < 0x80) return {static_cast<char>(c)};
  return {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 0x3f))};
}

// GPT-2's name of a byte.
std::string printable(int b) {
  int shifted = 0x100;
  for (int other = 0; other < 256; ++other) {
    const bool itself =
        (other >= '!' && other <= '~') || (other >= 0xa1 && other <= 0xac) || other >= 0xae;
    if (other == b) return utf8(static_cast<char32_t>(itself ? b : shifted));
    shifted += !itself;
  }
  return "";
}

// 256 bytes, then "ab", "abc", " a", "aa" in the order of their merges, then a marker.
class TinyBpe {
 public:
  TinyBpe() : dir_(fs::temp_directory_path() / fmt::format("shardrun_bpe_{}", getpid())) {
    fs::create_directories(dir_);
    nlohmann::json names;
    for (int b = 0; b < 256; ++b) names[printable(b)] = b;
    const std::string space = printable(' ');
    names["ab"] = 256;
    names["abc"] = 257;
    names[space + "a"] = 258;
    names["aa"] = 259;
    names["<|end of text|>"] = 260;
    write("encoder.json", names.dump());
    write("vocab.bpe", "#version: 0.2\na b\nab c\n" + space + " a\na a\n");
  }
  ~TinyBpe() { fs::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  std::string spec() const { return "gpt2:" + dir_.string(); }
  std::string file(const std::string& name) const { return (dir_ / name).string(); }

 private:
  fs::path dir_;
};

std::string random_text(std::mt19937_64& random, size_t longest) {
  static const std::vector<std::string> parts = {"a",
                                                 "b",
                                                 "c",
                                                 " ",
                                                 "\n",
                                                 "'s",
                                                 "'",
                                                 "1",
                                                 "\xc3\xa9",
                                                 "\xe2\x80\x94",
                                                 "\xf0\x9f\x99\x82",
                                                 "\xc2\xa0",
                                                 "\xff",
                                                 "\xc3",
                                                 "\xe2\x80",
                                                 "\t",
                                                 ".",
                                                 std::string(1, '\0'),
                                                 "  "};
  std::string text;
  for (size_t i = random() % (longest + 1); i > 0; --i) text += parts[random() % parts.size()];
  return text;
}

std::vector<std::string> pieces(std::string_view text) {
  std::vector<std::string> result;
  while (!text.empty()) {
    result.emplace_back(text.substr(0, gpt2_piece(text)));
    text.remove_prefix(result.back().size());
  }
  return result;
}

using Ids = std::vector<int32_t>;

TEST(Tokenizer, Bytes) {
  const auto bytes = make_tokenizer("byte");
  EXPECT_EQ(bytes->vocabulary(), 256);
  EXPECT_EQ(bytes->encode("a\xff"), (Ids{97, 255}));
  EXPECT_EQ(bytes->decode(Ids{97, 255}), "a\xff");
  expect_error(ExitCode::data, {"token 1", "256"}, [&] { bytes->decode(Ids{1, 256}); });
  expect_error(ExitCode::usage, {"word", "gpt2:DIR"}, [] { make_tokenizer("word"); });
}

TEST(Tokenizer, PiecesAreThoseOfThePattern) {
  // Made with the pattern itself, by Python's regex module.
  const std::vector<std::pair<std::string, std::vector<std::string>>> table = {
      {"Hello, I'm a language model,",
       {"Hello", ",", " I", "'m", " a", " language", " model", ","}},
      {"  two  spaces\n\n\ttab ", {" ", " two", " ", " spaces", "\n\n", "\t", "tab", " "}},
      {"I'll they've don't 'S", {"I", "'ll", " they", "'ve", " don", "'t", " '", "S"}},
      {"na\303\257ve Gr\303\266\303\237e \342\200\224 \342\200\234quotes\342\200\235",
       {"na\303\257ve", " Gr\303\266\303\237e", " \342\200\224", " \342\200\234", "quotes",
        "\342\200\235"}},
      {"\346\227\245\346\234\254 12345 \302\275 x\302\262",
       {"\346\227\245\346\234\254", " 12345", " \302\275", " x", "\302\262"}},
      {"<|endoftext|>", {"<|", "endoftext", "|>"}},
      {"a\302\240b\342\200\203 c", {"a", "\302\240", "b", "\342\200\203", " c"}},
      {"x = [1,2];\r\n  return;\n",
       {"x", " =", " [", "1", ",", "2", "];", "\r\n ", " return", ";", "\n"}},
  };
  for (const auto& [text, wanted] : table) EXPECT_EQ(pieces(text), wanted) << text;
}

TEST(Tokenizer, MergesByRankLeftmostFirst) {
  const TinyBpe files;
  const auto bpe = make_tokenizer(files.spec());
  EXPECT_EQ(bpe->vocabulary(), 261);
  EXPECT_EQ(bpe->encode("abc"), (Ids{257}));
  EXPECT_EQ(bpe->encode("aab"), (Ids{97, 256}));  // "a b" before "a a"
  EXPECT_EQ(bpe->encode("aaa"), (Ids{259, 97}));
  EXPECT_EQ(bpe->encode(" aab"), (Ids{258, 256}));
  EXPECT_EQ(bpe->encode(""), Ids{});
  EXPECT_EQ(bpe->decode(Ids{258, 257, 260}), " aabc<|end of text|>");
  expect_error(ExitCode::data, {"token 0", "261"}, [&] { bpe->decode(Ids{261}); });
  expect_error(ExitCode::data, {"token 0", "-1"}, [&] { bpe->decode(Ids{-1}); });
}

TEST(Tokenizer, DecodingGivesTheSameBytes) {
  const TinyBpe files;
  const auto bpe = make_tokenizer(files.spec());
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::string text = random_text(random, 40);
    ASSERT_EQ(bpe->decode(bpe->encode(text)), text);
  }
}

TEST(Tokenizer, CutsChangeNothing) {
  const TinyBpe files;
  const auto bpe = make_tokenizer(files.spec());
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::string text = random_text(random, 60);
    Ids joined;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t cut = safe_cut(rest, 1 + random() % 10);
      ASSERT_GE(cut, 1u);
      const Ids part = bpe->encode(rest.substr(0, cut));
      joined.insert(joined.end(), part.begin(), part.end());
      rest.remove_prefix(cut);
    }
    ASSERT_EQ(joined, bpe->encode(text)) << text;
  }
}

TEST(Tokenizer, LongPiecesTakeNoSquareTime) {
  const TinyBpe files;
  const auto bpe = make_tokenizer(files.spec());
  EXPECT_EQ(bpe->encode(std::string(1'000'000, 'a')).size(), 500'000u);
}

TEST(Tokenizer, BadFiles) {
  expect_error(ExitCode::no_input, {"/nowhere/encoder.json"},
               [] { make_tokenizer("gpt2:/nowhere"); });
  const auto broken = [](const std::string& name, const std::string& text,
                         std::initializer_list<std::string> parts) {
    const TinyBpe files;
    files.write(name, text);
    expect_error(ExitCode::data, parts, [&] { make_tokenizer(files.spec()); });
  };
  broken("encoder.json", "{", {"encoder.json", "not JSON"});
  broken("encoder.json", "[]", {"encoder.json", "wanted an object"});
  broken("encoder.json", R"({"a": 0, "b": 0})", {"encoder.json", "got 0", "below 2 once"});
  broken("encoder.json", R"({"a": "x"})", {"encoder.json", "\"x\""});
  broken("encoder.json", R"({"a": 0})", {"encoder.json", "no token for byte"});
  broken("vocab.bpe", "#version: 0.2\n", {"vocab.bpe", "no merges"});
  broken("vocab.bpe", "#version: 0.2\na z\n", {"vocab.bpe", "line 2", "\"a z\""});
  broken("vocab.bpe", "ab\n", {"vocab.bpe", "line 1"});
}

TEST(Tokenizer, PublishedEncodings) {
  const char* dir = std::getenv("SHARDRUN_TEST_GPT2_BPE");
  if (!dir)
    GTEST_SKIP() << "SHARDRUN_TEST_GPT2_BPE names no folder with encoder.json and vocab.bpe";
  const auto bpe = make_tokenizer(std::string("gpt2:") + dir);
  EXPECT_EQ(bpe->vocabulary(), 50257);
  const std::vector<std::pair<std::string, Ids>> table = {
      {"Hello world", {15496, 995}},
      {"Hello, I'm a language model,", {15496, 11, 314, 1101, 257, 3303, 2746, 11}},
      {"  two  spaces\n\n\ttab ", {220, 734, 220, 9029, 628, 197, 8658, 220}},
      {"I'll they've don't 'S", {40, 1183, 484, 1053, 836, 470, 705, 50}},
      {"na\303\257ve caf\303\251 Gr\303\266\303\237e \342\200\224 \342\200\234quotes\342\200\235",
       {2616, 38776, 40304, 1902, 9101, 39683, 68, 851, 564, 250, 421, 6421, 447, 251}},
      {"\346\227\245\346\234\254\350\252\236 \321\200\321\203\321\201\321\201\320\272\320\270\320"
       "\271 12345 \302\275 x\302\262",
       {33768, 98,    17312, 105, 45739, 252,   220,  21169, 35072, 21727,
        21727, 31583, 18849, 140, 117,   17031, 2231, 25208, 2124,  31185}},
      {"aaaaaaaaaaaaaaaaaaaa", {24794, 24794, 24794, 24794, 24794}},
      {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},
      {"a\302\240b\342\200\203 c", {64, 1849, 65, 447, 225, 269}},
      {"\360\237\231\202\360\237\231\202 ok", {8582, 25081, 8582, 25081, 12876}},
      {"x = [1,2];\r\n  return;\n",
       {87, 796, 685, 16, 11, 17, 11208, 201, 198, 220, 1441, 26, 198}},
  };
  for (const auto& [text, ids] : table) {
    EXPECT_EQ(bpe->encode(text), ids) << text;
    EXPECT_EQ(bpe->decode(ids), text);
  }
  EXPECT_EQ(bpe->decode(Ids{50256}), "<|endoftext|>");
}

}  // namespace
}  // namespace shardrun
