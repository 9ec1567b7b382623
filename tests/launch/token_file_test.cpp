// Readers of token files: each format, each way in which a file can be wrong, and the writer.
#include "launch/data/token_file.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "launch/data/data_command.h"
#include "tests/launch/data_files.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

using Ids = std::vector<int32_t>;

TokenFile open(const std::string& path) {
  static const auto bytes = make_tokenizer("byte");
  return TokenFile::open(path, *bytes);
}

Ids all(const TokenFile& file, int64_t vocabulary = 65536) {
  Ids out(static_cast<size_t>(file.size()));
  file.read(0, out, vocabulary);
  return out;
}

TEST(TokenFile, NanoGpt) {
  const TempDir dir("nano");
  const auto file = open(dir.write("a.bin", raw<uint16_t>({1, 50256, 65535})));
  EXPECT_EQ(file.format(), TokenFormat::nanogpt);
  EXPECT_EQ(all(file), (Ids{1, 50256, 65535}));
  Ids one(1);
  file.read(1, one, 50257);
  EXPECT_EQ(one[0], 50256);
  expect_error(ExitCode::data, {"a.bin", "token 2", "byte offset 4", "got 65535", "50256"},
               [&] { all(file, 50257); });
  expect_error(ExitCode::data, {"odd.bin", "got 3 bytes", "even"},
               [&] { open(dir.write("odd.bin", "abc")); });
  expect_error(ExitCode::data, {"empty.bin", "empty"}, [&] { open(dir.write("empty.bin", "")); });
  expect_error(ExitCode::no_input, {"none.bin"}, [&] { open(dir / "none.bin"); });
  expect_error(ExitCode::no_input, {"regular"}, [&] { open(dir / ""); });
}

TEST(TokenFile, Llmc) {
  const TempDir dir("llmc");
  const std::string tokens = raw<uint16_t>({7, 8, 9});
  for (const char* name : {"a.bin", "tokens"}) {
    const auto file = open(dir.write(name, llmc_header(1, 3) + tokens));
    EXPECT_EQ(file.format(), TokenFormat::llmc);
    EXPECT_EQ(all(file), (Ids{7, 8, 9}));
    expect_error(ExitCode::data, {"token 1", "byte offset 1026", "got 8"}, [&] { all(file, 8); });
  }
  expect_error(ExitCode::data, {"offset 4", "got version 2", "wanted 1"},
               [&] { open(dir.write("b.bin", llmc_header(2, 3) + tokens)); });
  expect_error(ExitCode::data, {"offset 8", "got 1030 bytes", "wanted 1032"},
               [&] { open(dir.write("b.bin", llmc_header(1, 4) + tokens)); });
  expect_error(ExitCode::data, {"offset 8", "got -1"},
               [&] { open(dir.write("b.bin", llmc_header(1, -1) + tokens)); });
  expect_error(ExitCode::data, {"got 100 bytes", "1024"},
               [&] { open(dir.write("b.bin", llmc_header(1, 3).substr(0, 100))); });
}

TEST(TokenFile, Megatron) {
  const TempDir dir("megatron");
  dir.write("a.bin", raw<int32_t>({5, 6, 70000, 8}));
  dir.write("a.idx", megatron_index(4, {3, 0, 1}, {0, 12, 12}, {0, 2, 3}));
  for (const char* name : {"a", "a.bin", "a.idx"}) {
    const auto file = open(dir / name);
    EXPECT_EQ(file.format(), TokenFormat::megatron);
    EXPECT_EQ(file.documents(), 2);
    EXPECT_EQ(all(file, 100000), (Ids{5, 6, 70000, 8}));
    expect_error(ExitCode::data, {"a.bin", "token 2", "byte offset 8"}, [&] { all(file); });
  }
  const auto tokens_of = [&](uint8_t code, const std::string& bytes, int32_t count) {
    dir.write("t.bin", bytes);
    dir.write("t.idx", megatron_index(code, {count}, {0}, {0, 1}));
    return all(open(dir / "t"), 100000);
  };
  EXPECT_EQ(tokens_of(1, raw<uint8_t>({1, 255}), 2), (Ids{1, 255}));
  EXPECT_EQ(tokens_of(2, raw<int8_t>({1, 127}), 2), (Ids{1, 127}));
  EXPECT_EQ(tokens_of(3, raw<int16_t>({1, 32767}), 2), (Ids{1, 32767}));
  EXPECT_EQ(tokens_of(5, raw<int64_t>({1, 99999}), 2), (Ids{1, 99999}));
  EXPECT_EQ(tokens_of(8, raw<uint16_t>({1, 65535}), 2), (Ids{1, 65535}));
  expect_error(ExitCode::data, {"token 1", "got -1"}, [&] {
    tokens_of(5, raw<int64_t>({1, -1}), 2);
  });
  expect_error(ExitCode::data, {"got 4294967297"},
               [&] { tokens_of(5, raw<int64_t>({4294967297}), 1); });
  expect_error(ExitCode::data, {"t.idx", "offset 17", "code 6"}, [&] { tokens_of(6, "", 0); });

  const std::string good = megatron_index(4, {3, 1}, {0, 12}, {0, 2});
  const auto wrong = [&](const std::string& index, std::initializer_list<std::string> parts) {
    dir.write("a.idx", index);
    expect_error(ExitCode::data, parts, [&] { open(dir / "a"); });
  };
  wrong("", {"a.idx", "header of 34"});
  wrong("X" + good.substr(1), {"magic"});
  wrong(good.substr(0, good.size() - 1), {"offset 18", "2 sequences"});
  wrong(megatron_index(4, {3, -1}, {0, 12}, {0, 2}), {"offset 38", "length -1"});
  wrong(megatron_index(4, {3, 1}, {0, 8}, {0, 2}), {"offset 50", "got byte offset 8", "wanted 12"});
  wrong(megatron_index(4, {3, 2}, {0, 12}, {0, 2}), {"byte 20", "at most 16"});
  wrong(megatron_index(4, {3}, {0}, {0, 1}), {"got 16 bytes", "wanted 12"});
  wrong(megatron_index(4, {3, 1}, {0, 12}, {0, 3}), {"document start 3"});
  std::string huge = good;
  const uint64_t many = ~0ull / 4;
  huge.replace(18, 8, raw<uint64_t>({many}));
  wrong(huge, {"offset 18"});
  dir.write("a.idx", good);
  std::filesystem::remove(dir / "a.bin");
  expect_error(ExitCode::no_input, {"a.bin"}, [&] { open(dir / "a.idx"); });
}

// Any change of any byte is read or refused, never followed outside the file.
TEST(TokenFile, DamagedIndexesAreRefusedOrRead) {
  const TempDir dir("fuzz");
  dir.write("a.bin", raw<int32_t>({5, 6, 7, 8}));
  const std::string good = megatron_index(4, {3, 1}, {0, 12}, {0, 2});
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 3000; ++trial) {
    std::string bad = good;
    for (uint64_t i = 1 + random() % 3; i > 0; --i) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) bad.resize(random() % bad.size());
    dir.write("a.idx", bad);
    try {
      const auto file = open(dir / "a");
      EXPECT_LE(file.size(), 16);
      all(file);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    }
  }
}

TEST(TokenFile, Text) {
  const TempDir dir("text");
  const auto file = open(dir.write("a.txt", "hi\n"));
  EXPECT_EQ(file.format(), TokenFormat::text);
  EXPECT_EQ(all(file), (Ids{'h', 'i', '\n'}));
  expect_error(ExitCode::data, {"a.txt", "token 0", "got 104"}, [&] { all(file, 65); });
}

TEST(TokenFileWriter, WritesWhatIsRead) {
  const TempDir dir("writer");
  {
    TokenFileWriter writer(dir / "a.bin");
    writer.append(Ids{1, 2});
    writer.append(Ids{65535});
    EXPECT_FALSE(std::filesystem::exists(dir / "a.bin"));
    writer.finish();
  }
  EXPECT_EQ(all(open(dir / "a.bin")), (Ids{1, 2, 65535}));
  {
    TokenFileWriter writer(dir / "b.bin");
    writer.append(Ids{1});
    expect_error(ExitCode::data, {"token 2", "got 65536"}, [&] { writer.append(Ids{1, 65536}); });
  }
  int files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir / "")) ++files;
  EXPECT_EQ(files, 1) << "an unfinished file was left";
  expect_error(ExitCode::cannot_create, {"/nowhere/"}, [] { TokenFileWriter w("/nowhere/a.bin"); });
}

TEST(DataCommand, EncodesInspectsChecks) {
  const TempDir dir("command");
  const std::string text = dir.write("a.txt", "hello \"tokens\"\n");
  const auto run = [](const std::vector<std::string>& words) {
    std::ostringstream out;
    data_command(words, out);
    return out.str();
  };
  EXPECT_NE(run({text, "--out", dir / "a.bin"}).find("15 tokens from 15 bytes"), std::string::npos);
  EXPECT_EQ(all(open(dir / "a.bin")), all(open(text)));
  const std::string seen = run({"inspect", dir / "a.bin"});
  EXPECT_NE(seen.find("llm.c, 15 tokens of uint16, 1 document, numbers 10 to 116"),
            std::string::npos)
      << seen;
  EXPECT_NE(seen.find(R"(begins with "hello \"tokens\"\n")"), std::string::npos) << seen;
  EXPECT_NE(run({"inspect", dir / "a.bin", "--json"}).find("\"tokens\":15"), std::string::npos);
  EXPECT_NE(run({"check", dir / "a.bin", "--tokenizer", "byte"}).find("all below 256"),
            std::string::npos);
  expect_error(ExitCode::data, {"token 0", "got 104"}, [&] {
    run({"check", dir / "a.bin", "--vocab", "65"});
  });
  expect_error(ExitCode::usage, {"--out"}, [&] { run({text}); });
  expect_error(ExitCode::usage, {"got 0 files"}, [&] { run({"inspect"}); });
  expect_error(ExitCode::usage, {"got 2 files"}, [&] { run({text, text}); });
  expect_error(ExitCode::no_input, {"none.txt"}, [&] {
    run({"none.txt", "--out", dir / "b.bin"});
  });
  expect_error(ExitCode::data, {"empty"}, [&] {
    run({dir.write("e.txt", ""), "--out", dir / "b.bin"});
  });
}

}  // namespace
}  // namespace shardrun
