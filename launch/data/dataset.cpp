#include "launch/data/dataset.h"

#include <algorithm>
#include <utility>

#include "kernels/loss.h"
#include "runtime/error.h"
#include "runtime/random.h"

namespace shardrun {
namespace {

constexpr int kRounds = 8;

uint64_t epoch_key(uint64_t seed, int64_t epoch, std::string_view what) {
  return mix64(random_key(seed, Purpose::shuffle, hash_name(what), 0, 0).key,
               static_cast<uint64_t>(epoch));
}

}  // namespace

Permutation::Permutation(int64_t n, uint64_t key) : n_(static_cast<uint64_t>(n)), key_(key) {
  SHARDRUN_CHECK(n >= 1, "a permutation of {} things", n);
  while (half_bits_ < 32 && (uint64_t{1} << (2 * half_bits_)) < n_) ++half_bits_;
}

int64_t Permutation::operator()(int64_t i) const {
  auto x = static_cast<uint64_t>(i);
  SHARDRUN_CHECK(x < n_, "{} is not below {}", i, n_);
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = x >> half_bits_, right = x & mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t mixed = mix64(key_ + static_cast<uint64_t>(round), right) & mask;
      left = std::exchange(right, left ^ mixed);
    }
    x = left << half_bits_ | right;
  } while (x >= n_);
  return static_cast<int64_t>(x);
}

Dataset::Dataset(const TokenFile& file, int64_t begin, int64_t end, int64_t seq_len,
                 int64_t vocabulary, uint64_t seed, std::string purpose)
    : file_(&file),
      begin_(begin),
      end_(end),
      seq_len_(seq_len),
      vocabulary_(vocabulary),
      seed_(seed),
      purpose_(std::move(purpose)) {
  SHARDRUN_CHECK(0 <= begin && begin <= end && end <= file.size() && seq_len >= 1,
                 "tokens {} .. {} of {}, windows of {}", begin, end, file.size(), seq_len);
}

int64_t Dataset::samples_per_epoch() const {
  if (tokens() < seq_len_ + 1) {
    throw DataError("{}: got {} tokens for {}, wanted at least {}: seq-len {} and one more",
                    file_->path(), tokens(), purpose_, seq_len_ + 1, seq_len_);
  }
  // As many as fit at every phase, so that the epoch of a sample follows from its number.
  return std::max<int64_t>(1, (tokens() - seq_len_) / seq_len_);
}

void Dataset::fill(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const {
  SHARDRUN_CHECK(sample >= 0, "sample {}", sample);
  const int64_t windows = samples_per_epoch();
  const int64_t epoch = sample / windows;
  const auto phases = static_cast<uint64_t>(std::min(seq_len_, end_ - begin_ - windows * seq_len_));
  const auto phase = static_cast<int64_t>(epoch_key(seed_, epoch, "phase") % phases);
  const Permutation order(windows, epoch_key(seed_, epoch, "order"));
  const int64_t first = begin_ + phase + order(sample % windows) * seq_len_;
  file_->read(first, tokens.first(static_cast<size_t>(seq_len_)), vocabulary_);
  file_->read(first + 1, targets.first(static_cast<size_t>(seq_len_)), vocabulary_);
}

int64_t Dataset::evaluation_windows() const {
  if (tokens() < 2) {
    throw DataError("{}: got {} tokens for {}, wanted at least 2", file_->path(), tokens(),
                    purpose_);
  }
  return (tokens() - 1 + seq_len_ - 1) / seq_len_;
}

int64_t Dataset::evaluation_targets(int64_t window) const {
  SHARDRUN_CHECK(window >= 0 && window < evaluation_windows(), "window {} of {}", window,
                 evaluation_windows());
  return std::min(seq_len_, tokens() - 1 - window * seq_len_);
}

void Dataset::fill_evaluation(int64_t window, std::span<int32_t> tokens,
                              std::span<int32_t> targets) const {
  const auto valid = static_cast<size_t>(evaluation_targets(window));
  const auto length = static_cast<size_t>(seq_len_);
  const int64_t first = begin_ + window * seq_len_;
  file_->read(first, tokens.first(valid), vocabulary_);
  file_->read(first + 1, targets.first(valid), vocabulary_);
  std::ranges::fill(tokens.subspan(valid, length - valid), 0);
  std::ranges::fill(targets.subspan(valid, length - valid), kernels::kIgnoreTarget);
}

RunData::RunData(const std::string& data, const std::string& val_data, const Tokenizer& tokenizer)
    : training_([&] {
        if (data.empty()) throw UsageError("--data: wanted a text or token file");
        return TokenFile::open(data, tokenizer);
      }()) {
  if (!val_data.empty()) validation_ = TokenFile::open(val_data, tokenizer);
}

Dataset RunData::training(int64_t seq_len, int64_t vocabulary, uint64_t seed) const {
  const int64_t end = validation_ ? training_.size() : held_out_begin(training_.size());
  return {training_, 0, end, seq_len, vocabulary, seed, "training"};
}

Dataset RunData::validation(int64_t seq_len, int64_t vocabulary) const {
  if (validation_) {
    return {*validation_, 0, validation_->size(), seq_len, vocabulary, 0, "validation"};
  }
  return {training_,   held_out_begin(training_.size()), training_.size(), seq_len, vocabulary, 0,
          "validation"};
}

}  // namespace shardrun
