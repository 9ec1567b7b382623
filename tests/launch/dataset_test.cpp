// What samples are made of: orders are permutations, windows do not overlap, evaluation sees every
// token once, and a sample is a function of its number.
#include "launch/data/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "kernels/loss.h"
#include "launch/train/trainer.h"
#include "runtime/random.h"
#include "tests/launch/data_files.h"
#include "tests/launch/expect_error.h"

namespace shardrun {
namespace {

using Ids = std::vector<int32_t>;

// Token i of the file is i.
class Counting {
 public:
  explicit Counting(int64_t n) : dir_("dataset") {
    std::vector<uint16_t> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), 0);
    path_ = dir_.write("n.bin", raw(tokens));
    file_ = TokenFile::open(path_, *make_tokenizer("byte"));
  }
  const TokenFile& file() const { return file_; }
  const std::string& path() const { return path_; }
  Dataset all(int64_t seq_len, uint64_t seed = 1) const {
    return {file_, 0, file_.size(), seq_len, 65536, seed, "training"};
  }

 private:
  TempDir dir_;
  std::string path_;
  TokenFile file_;
};

TEST(Permutation, IsABijection) {
  for (int64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097}) {
    for (uint64_t key : {0ull, 1ull, 0xdeadbeefull}) {
      const Permutation order(n, key);
      std::vector<int> hits(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) ++hits.at(static_cast<size_t>(order(i)));
      EXPECT_EQ(std::ranges::count(hits, 1), n) << n << ' ' << key;
    }
  }
}

TEST(Permutation, ReachesFarRangesAndDependsOnItsKey) {
  const int64_t n = (int64_t{1} << 62) - 3;
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 1000; ++i) seen.insert(Permutation(n, 5)(n - 1 - i));
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_LT(*seen.begin(), n / 8);
  EXPECT_GT(*seen.rbegin(), n / 8 * 7);
  int same = 0;
  for (int64_t i = 0; i < 1000; ++i) same += Permutation(1000, 1)(i) == Permutation(1000, 2)(i);
  EXPECT_LT(same, 20);
}

// Every order of three things comes up about equally often.
TEST(Permutation, OrdersAreEven) {
  std::map<std::array<int64_t, 3>, int> counts;
  for (uint64_t key = 0; key < 6000; ++key) {
    const Permutation order(3, mix64(key));
    ++counts[{order(0), order(1), order(2)}];
  }
  EXPECT_EQ(counts.size(), 6u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 250);
}

TEST(Dataset, AnEpochHasEveryWindowOnce) {
  for (const auto& [n, seq_len] : std::vector<std::pair<int64_t, int64_t>>{
           {2, 1}, {9, 8}, {10, 8}, {16, 8}, {17, 8}, {100, 8}, {103, 7}, {1000, 64}, {33, 32}}) {
    const Counting data(n);
    const Dataset set = data.all(seq_len);
    const int64_t windows = set.samples_per_epoch();
    EXPECT_GE(windows * seq_len, n - 2 * seq_len);
    std::set<int64_t> phases;
    for (int64_t epoch = 0; epoch < 20; ++epoch) {
      std::set<int64_t> starts;
      for (int64_t i = 0; i < windows; ++i) {
        Ids tokens(static_cast<size_t>(seq_len)), targets(static_cast<size_t>(seq_len));
        set.fill(epoch * windows + i, tokens, targets);
        for (int64_t t = 0; t < seq_len; ++t) {
          ASSERT_EQ(tokens[t], tokens[0] + t);
          ASSERT_EQ(targets[t], tokens[t] + 1);
        }
        ASSERT_LT(targets.back(), n);
        starts.insert(tokens[0]);
      }
      ASSERT_EQ(static_cast<int64_t>(starts.size()), windows);
      // One phase: the starts are seq_len apart.
      EXPECT_EQ(*starts.rbegin() - *starts.begin(), (windows - 1) * seq_len);
      EXPECT_LT(*starts.begin(), seq_len);
      phases.insert(*starts.begin());
    }
    if (n >= 3 * seq_len && seq_len > 4) {
      EXPECT_GT(phases.size(), 3u) << n << ' ' << seq_len;
    }
  }
}

TEST(Dataset, ASampleIsAFunctionOfItsNumberAndTheSeed) {
  const Counting data(5000);
  const auto first_token = [&](const Dataset& set, int64_t sample) {
    Ids tokens(16), targets(16);
    set.fill(sample, tokens, targets);
    return tokens[0];
  };
  const Dataset a = data.all(16, 1), b = data.all(16, 1), c = data.all(16, 2);
  int same = 0;
  for (int64_t i = 2000; i >= 0; --i) {
    ASSERT_EQ(first_token(a, i), first_token(b, i));
    same += first_token(a, i) == first_token(c, i);
  }
  EXPECT_LT(same, 50);
  EXPECT_NE(first_token(a, 0), first_token(a, a.samples_per_epoch()));
}

TEST(Dataset, EvaluationSeesEveryTokenOnce) {
  for (int64_t n : {2, 3, 8, 9, 10, 16, 17, 18, 100}) {
    const Counting data(n);
    const Dataset set = data.all(8);
    Ids seen;
    int64_t counted = 0;
    for (int64_t w = 0; w < set.evaluation_windows(); ++w) {
      Ids tokens(8, 99), targets(8, 99);
      set.fill_evaluation(w, tokens, targets);
      for (size_t t = 0; t < 8; ++t) {
        if (targets[t] == kernels::kIgnoreTarget) {
          EXPECT_EQ(tokens[t], 0);
          continue;
        }
        EXPECT_EQ(targets[t], tokens[t] + 1);
        seen.push_back(targets[t]);
      }
      counted += set.evaluation_targets(w);
    }
    Ids wanted(static_cast<size_t>(n - 1));
    std::iota(wanted.begin(), wanted.end(), 1);
    EXPECT_EQ(seen, wanted);
    EXPECT_EQ(counted, n - 1);
  }
}

TEST(Dataset, HeldOutIsTheLastTenth) {
  for (int64_t n = 0; n < 1000; ++n) {
    EXPECT_EQ(held_out_begin(n), static_cast<int64_t>(std::floor(0.9 * static_cast<double>(n))));
  }
  const Counting data(1003);
  const auto bytes = make_tokenizer("byte");
  const RunData run(data.path(), "", *bytes);
  EXPECT_EQ(run.training(8, 65536, 1).tokens(), 902);
  const Dataset held_out = run.validation(8, 65536);
  EXPECT_EQ(held_out.tokens(), 101);
  Ids tokens(8), targets(8);
  held_out.fill_evaluation(0, tokens, targets);
  EXPECT_EQ(tokens[0], 902);
  const RunData both(data.path(), data.path(), *bytes);
  EXPECT_EQ(both.training(8, 65536, 1).tokens(), 1003);
  EXPECT_EQ(both.validation(8, 65536).tokens(), 1003);
  expect_error(ExitCode::usage, {"--data"}, [&] { RunData("", "", *bytes); });
}

TEST(Dataset, ShortDataAndBadTokens) {
  const Counting data(10);
  expect_error(ExitCode::data, {"n.bin", "got 10 tokens for training", "at least 11", "seq-len 10"},
               [&] { data.all(10).samples_per_epoch(); });
  EXPECT_EQ(data.all(9).samples_per_epoch(), 1);
  const Dataset one(data.file(), 9, 10, 4, 65536, 1, "validation");
  expect_error(ExitCode::data, {"got 1 tokens for validation", "at least 2"},
               [&] { one.evaluation_windows(); });
  const Dataset narrow(data.file(), 0, 10, 9, 9, 1, "training");
  Ids tokens(9), targets(9);
  expect_error(ExitCode::data, {"n.bin", "token 9", "byte offset 18", "got 9", "0 to 8"},
               [&] { narrow.fill(0, tokens, targets); });
}

TEST(Dataset, SampleNumbersCoverAStep) {
  std::set<int64_t> samples;
  for (int64_t leaf = 0; leaf < 4; ++leaf) {
    for (int64_t row = 0; row < 3; ++row) samples.insert(first_sample(5, 12, leaf, 3) + row);
  }
  EXPECT_EQ(samples.size(), 12u);
  EXPECT_EQ(*samples.begin(), 60);
  EXPECT_EQ(*samples.rbegin(), 71);
}

// A run that goes on with another global batch takes every remaining sample once.
TEST(DatasetLeaves, GoOnWhereTheOrderWas) {
  const Counting tokens(1000);
  const Dataset training = tokens.all(4), validation = tokens.all(4);
  const int64_t before = 6, after = 10, micro = 2;
  std::vector<std::vector<int32_t>> got, wanted;
  const auto take = [&](DatasetLeaves& leaves, int64_t step, int64_t global) {
    for (int64_t leaf = 0; leaf < global / micro; ++leaf) {
      std::vector<int32_t> in(4 * micro), out(4 * micro);
      leaves.training_leaf(step, leaf, Tensor(in.data(), Dtype::int32, {micro, 4}),
                           Tensor(out.data(), Dtype::int32, {micro, 4}));
      for (int64_t row = 0; row < micro; ++row) {
        got.emplace_back(in.begin() + row * 4, in.begin() + (row + 1) * 4);
      }
    }
  };
  DatasetLeaves first(training, validation, before, micro, false);
  for (int64_t step = 0; step < 3; ++step) take(first, step, before);
  EXPECT_EQ(first.next_sample(3), 18);
  DatasetLeaves second(training, validation, after, micro, false);
  second.go_on(3, first.next_sample(3));
  for (int64_t step = 3; step < 5; ++step) take(second, step, after);
  EXPECT_EQ(second.next_sample(5), 38);
  for (int64_t sample = 0; sample < 38; ++sample) {
    std::vector<int32_t> in(4), out(4);
    training.fill(sample, in, out);
    wanted.push_back(in);
  }
  EXPECT_EQ(got, wanted);
}

}  // namespace
}  // namespace shardrun
