// Checkpoints: what was saved by any number of ranks under any split comes back, bit for bit, in
// any range; the hash knows nothing of the split; what is damaged or cut off is found and named;
// and no failure leaves anything but the old sets.
#include "sharding/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "sharding/checkpoint/hash.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;

// A folder that goes with the test.
class Folder {
 public:
  Folder() {
    static std::atomic<int> count = 0;
    path_ = fs::temp_directory_path() / fmt::format("checkpoint_test.{}.{}", getpid(), count++);
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }
  operator const fs::path&() const { return path_; }

 private:
  fs::path path_;
};

struct Entry {
  std::string name;
  TensorKind kind;
  Shape shape;
  Dtype dtype;
  std::vector<std::byte> bytes;

  int64_t numel() const { return shape.numel(); }
  ConstTensor part(int64_t begin, int64_t count) const {
    return ConstTensor(bytes.data(), dtype, {numel()}).flat(begin, count);
  }
};

Entry entry(const std::string& name, TensorKind kind, Shape shape, Dtype dtype, uint32_t seed) {
  Entry e{name, kind, shape, dtype, {}};
  std::mt19937 random(seed);
  for (int64_t i = 0; i < shape.numel(); ++i) {
    const float value = static_cast<float>(random()) * 0x1p-32f - 0.5f;
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    // The upper half of an fp32 is a bf16.
    e.bytes.insert(e.bytes.end(), raw + (dtype == Dtype::bf16 ? 2 : 0), raw + 4);
  }
  return e;
}

std::vector<Entry> small_model() {
  std::vector<Entry> model;
  uint32_t seed = 1;
  for (const TensorKind kind : {TensorKind::master, TensorKind::moment1, TensorKind::moment2}) {
    model.push_back(entry("block.0.weight", kind, {37, 19}, Dtype::fp32, seed++));
    model.push_back(entry("block.0.bias", kind, {1}, Dtype::fp32, seed++));
    model.push_back(entry("a.scalar", kind, {}, Dtype::fp32, seed++));
    model.push_back(entry("empty", kind, {0, 4}, Dtype::fp32, seed++));
    // More than one hash piece, and none full at the end.
    model.push_back(entry("embedding", kind, {700, 501}, Dtype::fp32, seed++));
  }
  model.push_back(entry("low", TensorKind::master, {333}, Dtype::bf16, seed++));
  model.push_back(entry("norm.mean", TensorKind::buffer, {64}, Dtype::fp32, seed++));
  return model;
}

CheckpointState some_state(int64_t step) {
  CheckpointState state;
  state.step = step;
  state.applied_steps = step - 3;
  state.tokens = int64_t{1} << 40;
  state.skipped = 3;
  state.skipped_in_a_row = 1;
  state.scaler_policy = "default";
  state.scaler_counts = {{"good_steps", 17}, {"last_overflow", -1}};
  state.scaler_numbers = {{"scale", 0.1}, {"odd", std::numeric_limits<double>::denorm_min()}};
  state.seed = ~uint64_t{0};
  state.precision = "bf16";
  state.numerics_key = "micro 4, cpu\n\"quoted\" \xff";
  state.config_text = "model: \"tiny\"\nlr: 0.001\n";
  state.writer_version = "0.1.0";
  state.data_position = {{"epoch", 2}, {"sample", 99}};
  state.schedule = "cosine from 0.001";
  state.run = "0123abcd";
  return state;
}

// Cuts every tensor at random places and deals the parts to ranks at random.
std::vector<std::vector<CheckpointPiece>> split(const std::vector<Entry>& model, int ranks,
                                                uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<CheckpointPiece>> dealt(static_cast<size_t>(ranks));
  for (const Entry& e : model) {
    std::vector<int64_t> cuts{0, e.numel()};
    for (uint32_t i = random() % 5; i > 0; --i) {
      cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(e.numel() + 1)));
    }
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      // Where two cuts meet: an empty shard.
      dealt[random() % dealt.size()].push_back(
          {e.name, e.kind, e.shape, cuts[i], e.part(cuts[i], cuts[i + 1] - cuts[i])});
    }
  }
  for (auto& pieces : dealt) std::shuffle(pieces.begin(), pieces.end(), random);
  return dealt;
}

std::string save(const fs::path& out, const std::vector<Entry>& model, const CheckpointState& state,
                 int ranks = 1, uint32_t seed = 7) {
  const auto dealt = split(model, ranks, seed);
  std::string folder;
  run_thread_ranks(ranks, [&](Communicator& comm) {
    const std::string mine =
        save_checkpoint(out, state, dealt[static_cast<size_t>(comm.rank())], comm);
    if (comm.rank() == 0) folder = mine;
  });
  return folder;
}

void expect_same(CheckpointReader& reader, const std::vector<Entry>& model) {
  EXPECT_EQ(reader.tensors().size(), model.size());
  for (const Entry& e : model) {
    const auto& info = reader.expect(e.name, e.kind, e.shape);
    EXPECT_EQ(info.dtype, e.dtype);
    std::vector<std::byte> got(e.bytes.size());
    reader.read(e.name, e.kind, 0, Tensor(got.data(), e.dtype, {e.numel()}));
    EXPECT_EQ(got, e.bytes) << e.name;
  }
}

// The message of the Error of this code that `call` throws.
std::string message_of(ExitCode code, FunctionRef<void()> call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  ADD_FAILURE() << "`" << text << "` lacks `" << part << "`";
  return false;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(folder)) {
    if (e.path().filename() != "latest") names.push_back(e.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void flip_bit(const fs::path& path, int64_t byte) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(byte);
  const char old = static_cast<char>(file.get());
  file.seekp(byte);
  file.put(static_cast<char>(old ^ 4));
  ASSERT_TRUE(file.good());
}

TEST(Checkpoint, ComesBackFromAnyNumberOfRanksInAnyRange) {
  const auto model = small_model();
  std::string hash;
  for (const int ranks : {1, 2, 3, 5}) {
    Folder out;
    const auto state = some_state(100);
    const fs::path folder = save(out, model, state, ranks, static_cast<uint32_t>(ranks));
    EXPECT_EQ(folder, out.path() / "checkpoints" / "step-00000100");
    EXPECT_TRUE(fs::exists(folder / "manifest.txt"));
    EXPECT_EQ(fs::read_symlink(out.path() / "checkpoints" / "latest"), "step-00000100");
    auto reader = CheckpointReader::open(folder);
    EXPECT_EQ(reader.state(), state);
    EXPECT_EQ(std::bit_cast<uint64_t>(reader.state().scaler_numbers.at("odd")), 1u);
    expect_same(reader, model);

    std::mt19937 random(5);
    auto fresh = CheckpointReader::open(out);  // the newest of the run
    for (int i = 0; i < 200; ++i) {
      const Entry& e = model[random() % model.size()];
      const auto begin = static_cast<int64_t>(random() % static_cast<uint64_t>(e.numel() + 1));
      const auto count =
          static_cast<int64_t>(random() % static_cast<uint64_t>(e.numel() - begin + 1));
      const ConstTensor wanted = e.part(begin, count);
      std::vector<std::byte> got(wanted.bytes());
      fresh.read(e.name, e.kind, begin, Tensor(got.data(), e.dtype, {count}));
      EXPECT_TRUE(got.empty() || std::memcmp(got.data(), wanted.data(), got.size()) == 0);
    }
    EXPECT_EQ(verify_checkpoint(folder), std::vector<std::string>());
    if (hash.empty()) hash = checkpoint_hash(out);
    EXPECT_EQ(checkpoint_hash(folder), hash) << ranks;
    EXPECT_EQ(hash.size(), 32u);
  }
}

TEST(Checkpoint, HashChangesWithEveryBitAndCounterAndWithNothingElse) {
  const auto model = small_model();
  const auto hash_of = [](const std::vector<Entry>& m, const CheckpointState& s) {
    Folder out;
    return checkpoint_hash(save(out, m, s));
  };
  const auto state = some_state(100);
  const std::string base = hash_of(model, state);

  auto changed_model = model;
  changed_model[4].bytes[changed_model[4].bytes.size() / 2] ^= std::byte{1};
  EXPECT_NE(hash_of(changed_model, state), base);
  changed_model = model;
  changed_model[0].shape = {19, 37};
  EXPECT_NE(hash_of(changed_model, state), base);
  changed_model = model;
  changed_model[0].name = "block.0.weigth";
  EXPECT_NE(hash_of(changed_model, state), base);

  const auto changes = [&](FunctionRef<void(CheckpointState&)> change) {
    auto other = state;
    change(other);
    return hash_of(model, other) != base;
  };
  EXPECT_TRUE(changes([](auto& s) { s.step ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.applied_steps ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.tokens ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.skipped ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.skipped_in_a_row ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.scaler_counts["good_steps"] ^= 1; }));
  EXPECT_TRUE(changes([](auto& s) { s.scaler_numbers["scale"] = std::nextafter(0.1, 1.0); }));
  EXPECT_TRUE(changes([](auto& s) { s.seed ^= 1; }));
  EXPECT_FALSE(changes([](auto& s) { s.config_text = "out: \"elsewhere\""; }));
  EXPECT_FALSE(changes([](auto& s) { s.numerics_key = "other"; }));
}

TEST(Checkpoint, HashOfPiecesDoesNotSeeHowBytesWereCut) {
  std::vector<std::byte> bytes(PieceHash::kPieceBytes * 2 + 12345);
  std::mt19937 random(3);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  PieceHash whole, cut;
  whole.add(bytes);
  for (size_t at = 0; at < bytes.size();) {
    const size_t part = std::min<size_t>(random() % 400000, bytes.size() - at);
    cut.add(std::span(bytes).subspan(at, part));
    at += part;
  }
  EXPECT_EQ(whole.digest(), cut.digest());
  EXPECT_EQ(Hash128().digest().hex(), "99aa06d3014798d86001c324468d497f");  // XXH3-128 of nothing
  EXPECT_EQ(hash64({}), 0x2d06800538d394c2u);                               // XXH3-64 of nothing
}

TEST(Checkpoint, LongTensorsAreCutIntoChunks) {
  Folder out;
  // One element more than a chunk holds.
  constexpr int64_t kChunk = int64_t{1} << 20;
  std::vector<Entry> model{entry("long", TensorKind::master, {kChunk + 1}, Dtype::fp32, 1)};
  const fs::path folder = save(out, model, some_state(1));
  auto reader = CheckpointReader::open(folder);
  const int64_t begin = kChunk - 2;
  float got[3];
  reader.read("long", TensorKind::master, begin, Tensor(got, Dtype::fp32, {3}));
  EXPECT_EQ(std::memcmp(got, model[0].part(begin, 3).data(), sizeof(got)), 0);
  std::ifstream text(folder / "manifest.txt");
  const std::string content((std::istreambuf_iterator<char>(text)), {});
  contains(content, "end: 1048576\n");
  contains(content, "end: 1048577\n");
}

TEST(Checkpoint, ConvertsBetweenFp32AndBf16) {
  Folder out;
  const auto model = small_model();
  auto reader = CheckpointReader::open(save(out, model, some_state(1)));
  const Entry& low = model[model.size() - 2];
  std::vector<float> wide(333);
  reader.read("low", TensorKind::master, 0, Tensor(wide.data(), Dtype::fp32, {333}));
  for (size_t i = 0; i < wide.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, &low.bytes[2 * i], 2);
    EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), static_cast<uint32_t>(bits) << 16);
  }
  Bf16 narrow[19];
  reader.read("block.0.weight", TensorKind::master, 38, Tensor(narrow, Dtype::bf16, {19}));
  for (int i = 0; i < 19; ++i) {
    const float value = model[0].part(38, 19).as<float>()[i];
    const float got = std::bit_cast<float>(static_cast<uint32_t>(narrow[i].bits) << 16);
    EXPECT_NEAR(got, value, std::abs(value) / 256);
  }
}

TEST(Checkpoint, RefusesWhatIsNotInIt) {
  Folder out;
  auto reader = CheckpointReader::open(save(out, small_model(), some_state(1)));
  float x[8];
  const Tensor eight(x, Dtype::fp32, {8});
  contains(message_of(ExitCode::data, [&] { reader.read("nobody", TensorKind::master, 0, eight); }),
           "nobody");
  contains(message_of(ExitCode::data, [&] { reader.read("low", TensorKind::moment1, 0, eight); }),
           "moment1");
  for (const int64_t begin : {int64_t{326}, int64_t{-1}, INT64_MAX}) {
    contains(
        message_of(ExitCode::data, [&] { reader.read("low", TensorKind::master, begin, eight); }),
        "333");
  }
  const auto text = message_of(ExitCode::data, [&] {
    reader.expect("block.0.weight", TensorKind::master, {19, 37});
  });
  contains(text, "[37, 19]");
  contains(text, "[19, 37]");
  contains(message_of(ExitCode::no_input, [&] { CheckpointReader::open(out.path() / "no"); }),
           "no");
  Folder empty;
  message_of(ExitCode::no_input, [&] { CheckpointReader::open(empty); });
  EXPECT_EQ(newest_checkpoint(empty), std::nullopt);
}

TEST(Checkpoint, DamageIsFoundAndNamed) {
  const auto model = small_model();
  const auto damaged = [&](const std::string& file, ExitCode code, bool at_open,
                           FunctionRef<void(const fs::path&)> damage) {
    SCOPED_TRACE(file);
    Folder out;
    save(out, model, some_state(1), 2);
    const fs::path folder = save(out, model, some_state(2), 2);
    damage(folder / file);
    const std::string text = message_of(code, [&] {
      auto reader = CheckpointReader::open(folder);
      EXPECT_FALSE(at_open);
      expect_same(reader, model);
    });
    contains(text, file);
    const auto problems = verify_checkpoint(folder);
    ASSERT_FALSE(problems.empty());
    contains(problems[0], file);
    if (at_open) {
      EXPECT_EQ(newest_checkpoint(out).value().filename(), "step-00000001");
    }
    message_of(code, [&] { checkpoint_hash(folder); });
  };
  const auto resize = [](int64_t change) {
    return [change](const fs::path& p) {
      fs::resize_file(p, static_cast<uint64_t>(static_cast<int64_t>(fs::file_size(p)) + change));
    };
  };
  for (const std::string file : {"data-00000.bin", "data-00001.bin", "manifest.pb"}) {
    const bool manifest = file == "manifest.pb";
    damaged(file, ExitCode::data, true, resize(-1));
    damaged(file, ExitCode::data, true, resize(+1));
    damaged(file, ExitCode::data, true, [](const fs::path& p) { fs::resize_file(p, 0); });
    damaged(file, ExitCode::no_input, true, [](const fs::path& p) { fs::remove(p); });
    damaged(file, ExitCode::data, manifest,
            [](const fs::path& p) { flip_bit(p, static_cast<int64_t>(fs::file_size(p) / 2)); });
    damaged(file, ExitCode::data, manifest,
            [](const fs::path& p) { flip_bit(p, static_cast<int64_t>(fs::file_size(p)) - 1); });
  }
}

TEST(Checkpoint, AChunkThatWasReadOnceIsVerifiedOnlyWhereTouched) {
  Folder out;
  const auto model = small_model();
  const fs::path folder = save(out, model, some_state(1));
  auto reader = CheckpointReader::open(folder);
  flip_bit(folder / "data-00000.bin", 0);
  int readable = 0, refused = 0;
  for (const Entry& e : model) {
    std::vector<std::byte> got(e.bytes.size());
    try {
      reader.read(e.name, e.kind, 0, Tensor(got.data(), e.dtype, {e.numel()}));
      ++readable;
      EXPECT_EQ(got, e.bytes);
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(readable, static_cast<int>(model.size()) - 1);
  EXPECT_EQ(verify_checkpoint(folder).size(), 1u);
}

TEST(Checkpoint, NonFiniteMastersAndMomentsAreNeverCommitted) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    Folder out;
    auto model = small_model();
    save(out, model, some_state(1), 3);
    auto& e = model[9];
    ASSERT_EQ(e.name, "embedding");
    std::memcpy(&e.bytes[4 * 5000], &bad, 4);
    const auto text = message_of(ExitCode::data, [&] { save(out, model, some_state(2), 3); });
    contains(text, "embedding (moment1)");
    contains(text, "element 5000");
    EXPECT_EQ(names_in(out.path() / "checkpoints"), std::vector<std::string>{"step-00000001"});
  }
  Folder out;
  auto model = small_model();
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(&model[model.size() - 2].bytes[2 * 7], reinterpret_cast<const char*>(&infinity) + 2,
              2);
  contains(message_of(ExitCode::data, [&] { save(out, model, some_state(2)); }), "element 7");
  // Running statistics say nothing about the parameters.
  model = small_model();
  std::memcpy(model.back().bytes.data(), &infinity, 4);
  EXPECT_EQ(verify_checkpoint(save(out, model, some_state(2))), std::vector<std::string>());
}

TEST(Checkpoint, GapsAndOverlapsAreRefused) {
  const auto model = small_model();
  Folder out;
  const auto attempt = [&](int64_t begin0, int64_t end0, int64_t begin1, int64_t end1,
                           Shape shape1) {
    const Entry& e = model[0];
    run_thread_ranks(2, [&](Communicator& comm) {
      const bool first = comm.rank() == 0;
      const int64_t begin = first ? begin0 : begin1, end = first ? end0 : end1;
      const CheckpointPiece piece{e.name, e.kind, first ? e.shape : shape1, begin,
                                  e.part(begin, end - begin)};
      save_checkpoint(out, some_state(1), {&piece, 1}, comm);
    });
  };
  const int64_t n = model[0].numel();
  const Shape shape = model[0].shape;
  EXPECT_THROW(attempt(0, 10, 11, n, shape), DataError);
  EXPECT_THROW(attempt(0, 12, 11, n, shape), DataError);
  EXPECT_THROW(attempt(0, 10, 10, n - 1, shape), DataError);
  EXPECT_THROW(attempt(0, n, 0, n, shape), DataError);
  EXPECT_THROW(attempt(0, 10, 10, n, {n}), DataError);
  EXPECT_EQ(names_in(out.path() / "checkpoints"), std::vector<std::string>());
  attempt(10, n, 0, 10, shape);
  EXPECT_EQ(names_in(out.path() / "checkpoints"), std::vector<std::string>{"step-00000001"});
}

TEST(Checkpoint, OneRanksFailedWriteFailsAllAndLeavesTheOldSets) {
  Folder out;
  const auto model = small_model();
  const std::string before = checkpoint_hash(save(out, model, some_state(1), 3));
  // Rank 1 brings 1.4 MB, the others little; no file may exceed 500 kB.
  std::vector<std::vector<CheckpointPiece>> dealt(3);
  for (const Entry& e : model) {
    dealt[e.name == "embedding" ? 1 : 2].push_back(
        {e.name, e.kind, e.shape, 0, e.part(0, e.numel())});
  }
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit low{500000, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  std::vector<std::string> errors(3);
  run_thread_ranks(3, [&](Communicator& comm) {
    const auto rank = static_cast<size_t>(comm.rank());
    try {
      save_checkpoint(out, some_state(1), dealt[rank], comm);
    } catch (const IoError& error) {
      errors[rank] = error.what();
    }
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  for (const auto& error : errors) {
    contains(error, "rank 1 of 3");
    contains(error, "data-00001.bin");
    contains(error, "500000");
  }
  EXPECT_EQ(names_in(out.path() / "checkpoints"), std::vector<std::string>{"step-00000001"});
  EXPECT_EQ(checkpoint_hash(out), before);
}

TEST(Checkpoint, AnUnusableOutputFolderIsAnIoError) {
  Folder out;
  std::ofstream(out.path() / "checkpoints") << "a file, no folder";
  contains(message_of(ExitCode::io, [&] { save(out, small_model(), some_state(1), 2); }),
           "rank 0 of 2");
}

TEST(Checkpoint, ASetOfTheSameStepIsReplaced) {
  Folder out;
  auto model = small_model();
  const std::string first = checkpoint_hash(save(out, model, some_state(5), 3));
  model[0].bytes[0] ^= std::byte{1};
  const std::string second = checkpoint_hash(save(out.path() / "", model, some_state(5), 1));
  EXPECT_NE(first, second);
  EXPECT_EQ(names_in(out.path() / "checkpoints"), std::vector<std::string>{"step-00000005"});
  EXPECT_EQ(names_in(out.path() / "checkpoints" / "step-00000005"),
            (std::vector<std::string>{"data-00000.bin", "manifest.pb", "manifest.txt"}));
}

TEST(Checkpoint, WhatIsNotCompleteIsNeverChosen) {
  Folder out;
  const auto model = small_model();
  const fs::path sound = save(out, model, some_state(10));
  const fs::path parent = sound.parent_path();
  // As if the job had died just before the rename; a set without manifest; names that are not sets.
  fs::copy(sound, parent / ".step-00000020.tmp", fs::copy_options::recursive);
  fs::create_directories(parent / "step-00000030");
  fs::copy(sound, parent / "step-00000010.bak", fs::copy_options::recursive);
  fs::copy(sound, parent / "step-00000040", fs::copy_options::recursive);  // holds step 10
  std::ofstream(parent / "step-00000050") << "x";
  EXPECT_EQ(newest_checkpoint(out), sound);
  EXPECT_EQ(list_checkpoints(out), std::vector<fs::path>{sound});
  EXPECT_EQ(CheckpointReader::open(out).state().step, 10);
  const fs::path next = save(out, model, some_state(20));
  EXPECT_EQ(newest_checkpoint(out), next);
  EXPECT_FALSE(fs::exists(parent / ".step-00000020.tmp"));
}

TEST(Checkpoint, AKillAtAnyMomentLeavesACompleteSet) {
  const auto model = small_model();
  std::mt19937 random(11);
  for (int i = 0; i < 10; ++i) {
    Folder out;
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      // Each step twice: half of the saves replace a set.
      for (int64_t n = 2;; ++n) {
        save(out, model, some_state(n / 2), 2);
        const int64_t done = n / 2;
        if (write(ends[1], &done, sizeof(done)) < 0) _exit(1);
      }
    }
    close(ends[1]);
    int64_t done = 0, next = 0;
    ASSERT_EQ(read(ends[0], &done, sizeof(done)), static_cast<ssize_t>(sizeof(done)));
    usleep(random() % 40000);
    ASSERT_EQ(kill(child, SIGKILL), 0);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    while (read(ends[0], &next, sizeof(next)) == static_cast<ssize_t>(sizeof(next))) done = next;
    close(ends[0]);
    const auto newest = newest_checkpoint(out);
    ASSERT_TRUE(newest.has_value());
    EXPECT_EQ(verify_checkpoint(*newest), std::vector<std::string>());
    EXPECT_GE(CheckpointReader::open(out).state().step, done);
  }
}

// What a later version might write, with a digest that fits: `change` gets the manifest's bytes
// without its last field, the digest.
TEST(Checkpoint, WhatANewerVersionWroteIsRefusedByName) {
  const auto refuse = [](const std::vector<std::string>& parts,
                         FunctionRef<void(std::string&)> change) {
    Folder out;
    const fs::path folder = save(out, small_model(), some_state(7));
    std::ifstream in(folder / "manifest.pb", std::ios::binary);
    std::string body((std::istreambuf_iterator<char>(in)), {});
    const char tag = body[body.size() - 9];
    body.resize(body.size() - 9);
    change(body);
    const uint64_t digest = hash64(std::as_bytes(std::span(body)));
    body += tag;
    for (int i = 0; i < 8; ++i) body += static_cast<char>(digest >> (8 * i));
    std::ofstream(folder / "manifest.pb", std::ios::binary) << body;
    const std::string text =
        message_of(ExitCode::data, [&] { CheckpointReader::open(folder); });
    for (const std::string& part : parts) contains(text, part);
    EXPECT_EQ(newest_checkpoint(out), std::nullopt);
  };
  refuse({"got format 2, wanted 1", "a newer version", "0.1.0"}, [](std::string& body) {
    ASSERT_EQ(body.substr(0, 2), "\x08\x01");
    body[1] = 2;
  });
  refuse({"Manifest has an unknown key, number 9", "a newer version"},
         [](std::string& body) { body += "\x48\x01"; });
  // A second State is merged into the first.
  refuse({"State has an unknown key, number 30", "a newer version"},
         [](std::string& body) { body += std::string("\x12\x03\xf0\x01\x01", 5); });
}

TEST(Checkpoint, TheTargetIsProbed) {
  Folder out;
  const auto probe = [&](const fs::path& where, int64_t bytes, int ranks) {
    run_thread_ranks(ranks, [&](Communicator& comm) {
      probe_checkpoints(where, bytes, comm.rank(), ranks, [&](FunctionRef<void()> action) {
        action();
        comm.barrier();
      });
    });
  };
  probe(out.path() / "a" / "b", 1000, 3);
  EXPECT_EQ(names_in(out.path() / "a" / "b" / "checkpoints"), std::vector<std::string>());
  contains(message_of(ExitCode::cannot_create,
                      [&] { probe(out.path() / "c", int64_t{1} << 60, 2); }),
           "a set takes 1152921504606846976 bytes");
  EXPECT_FALSE(fs::exists(out.path() / "c"));
  std::ofstream(out.path() / "file") << "no folder";
  contains(message_of(ExitCode::cannot_create, [&] { probe(out.path() / "file", 1, 2); }), "file");
  // Ranks that do not share the folder: each sees its own file only.
  std::atomic<int> refused = 0;
  run_thread_ranks(2, [&](Communicator& comm) {
    const fs::path own = out.path() / fmt::format("node-{}", comm.rank());
    fs::create_directories(own / "checkpoints");
    try {
      probe_checkpoints(own, 1, comm.rank(), 2, [&](FunctionRef<void()> action) {
        try {
          action();
        } catch (...) {
          comm.barrier();
          throw;
        }
        comm.barrier();
      });
    } catch (const CannotCreateError& error) {
      contains(error.what(), "not on a file system that all ranks share");
      ++refused;
    }
  });
  EXPECT_EQ(refused, 2);
}

// The numbers come from another implementation of XXH3 (python3 xxhash) and the rule in the header.
TEST(Checkpoint, HashStaysWhatItIs) {
  Folder out;
  Entry w{"w", TensorKind::master, {300000}, Dtype::fp32, {}};
  for (int i = 0; i < 300000; ++i) {
    const float value = static_cast<float>(i);
    const auto* raw = reinterpret_cast<const std::byte*>(&value);
    w.bytes.insert(w.bytes.end(), raw, raw + 4);
  }
  CheckpointState state;
  state.step = 5;
  state.tokens = 640;
  state.scaler_counts = {{"good_steps", -1}};
  state.scaler_numbers = {{"scale", 65536}};
  state.seed = 42;
  EXPECT_EQ(checkpoint_hash(save(out, {w}, state, 2)), "41721400484d754675922ec0d2ed058a");
}

TEST(Checkpoint, RotationKeepsTheLastAndEachSoMany) {
  const std::vector<Entry> model{entry("w", TensorKind::master, {3}, Dtype::fp32, 1)};
  const auto steps_after = [&](int64_t keep_last, int64_t keep_every, int64_t current,
                               int64_t of_another_run = -1) {
    Folder out;
    for (const int64_t step : {10, 20, 30, 40, 50}) {
      CheckpointState state = some_state(step);
      state.run = step == of_another_run ? "theirs" : "ours";
      save(out, model, state);
    }
    const fs::path parent = out.path() / "checkpoints";
    fs::create_directories(parent / ".step-00000060.tmp");
    fs::create_directories(parent / "step-00000005");
    fs::create_directories(parent / "mine");
    rotate_checkpoints(out, keep_last, keep_every, "ours", current);
    EXPECT_FALSE(fs::exists(parent / ".step-00000060.tmp"));
    EXPECT_TRUE(fs::exists(parent / "step-00000005"));
    EXPECT_TRUE(fs::exists(parent / "mine"));
    std::vector<int64_t> steps;
    for (const auto& set : list_checkpoints(out)) {
      steps.push_back(CheckpointReader::open(set).state().step);
    }
    return steps;
  };
  using Steps = std::vector<int64_t>;
  EXPECT_EQ(steps_after(0, 0, -1), (Steps{10, 20, 30, 40, 50}));
  EXPECT_EQ(steps_after(2, 0, -1), (Steps{40, 50}));
  EXPECT_EQ(steps_after(1, 20, -1), (Steps{20, 40, 50}));
  EXPECT_EQ(steps_after(9, 0, -1), (Steps{10, 20, 30, 40, 50}));
  EXPECT_EQ(steps_after(1, 0, 30), (Steps{30, 40, 50}));
  EXPECT_EQ(steps_after(2, 0, -1, 20), (Steps{20, 40, 50}));
  EXPECT_EQ(steps_after(2, 0, -1, 50), (Steps{30, 40, 50}));
}

}  // namespace
}  // namespace shardrun
