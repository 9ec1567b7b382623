// Which tokens a sample is made of. The training loop asks for samples by number and the evaluation
// for windows by number; both answers are functions of that number, the seed and the file, and of
// nothing else: not of who asks, nor of what was asked before. A resumed run continues by counting.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "launch/data/token_file.h"

namespace shardrun {

// A permutation of 0 .. n-1 in constant memory: a Feistel network over the next power of four,
// walked along its cycles until it lands below n (Black and Rogaway, "Ciphers with Arbitrary Finite
// Domains", 2002).
class Permutation {
 public:
  Permutation(int64_t n, uint64_t key);
  int64_t operator()(int64_t i) const;

 private:
  uint64_t n_;
  int half_bits_ = 1;
  uint64_t key_;
};

// Windows of `seq_len` inputs and as many targets, each target the token after its input, over the
// tokens begin .. end of a file that outlives the dataset.
class Dataset {
 public:
  // `purpose` names the part in messages ("training", "validation").
  Dataset(const TokenFile& file, int64_t begin, int64_t end, int64_t seq_len, int64_t vocabulary,
          uint64_t seed, std::string purpose);

  int64_t tokens() const { return end_ - begin_; }
  int64_t seq_len() const { return seq_len_; }

  // Training order. Sample s belongs to epoch s / samples_per_epoch(): the part is cut into windows
  // that do not overlap (but for the one token that is the last target of one and the first input
  // of the next), beginning at a random phase below seq_len, and the windows come in random order;
  // phase and order are functions of (seed, epoch). DataError where the part has no window.
  int64_t samples_per_epoch() const;
  // tokens, targets: [seq_len].
  void fill(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const;

  // Evaluation order: windows one after another from the beginning of the part; every token but the
  // first is a target exactly once. The last window is filled up with token 0 and target -1
  // (kernels::kIgnoreTarget). DataError where the part has fewer than two tokens.
  int64_t evaluation_windows() const;
  void fill_evaluation(int64_t window, std::span<int32_t> tokens, std::span<int32_t> targets) const;
  // Targets in a window that count.
  int64_t evaluation_targets(int64_t window) const;

 private:
  const TokenFile* file_;
  int64_t begin_, end_, seq_len_, vocabulary_;
  uint64_t seed_;
  std::string purpose_;
};

// Sample numbers of step `step`, counted over all epochs: leaf `leaf` begins here and has
// micro_batch of them in a row.
constexpr int64_t first_sample(int64_t step, int64_t global_batch, int64_t leaf,
                               int64_t micro_batch) {
  return step * global_batch + leaf * micro_batch;
}

// The files of a run and their parts. Without a validation file the last tenth of the training file
// is held out: training ends at floor(0.9 n), as nanoGPT has it. Move-only; datasets point into it.
class RunData {
 public:
  // Paths as given by --data and --val-data (may be empty).
  RunData(const std::string& data, const std::string& val_data, const Tokenizer& tokenizer);

  Dataset training(int64_t seq_len, int64_t vocabulary, uint64_t seed) const;
  Dataset validation(int64_t seq_len, int64_t vocabulary) const;
  const TokenFile& training_file() const { return training_; }

 private:
  TokenFile training_;
  std::optional<TokenFile> validation_;
};

// floor(0.9 n).
constexpr int64_t held_out_begin(int64_t n) {
  return n / 10 * 9 + n % 10 * 9 / 10;
}

}  // namespace shardrun
