#include "sharding/checkpoint/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <new>

namespace shardrun {
namespace {

XXH3_state_t* new_state() {
  XXH3_state_t* state = XXH3_createState();
  if (state == nullptr) throw std::bad_alloc();
  return state;
}

}  // namespace

std::string Digest128::hex() const {
  return fmt::format("{:016x}{:016x}", high, low);
}

void HashState::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

Hash64::Hash64() {
  state_.reset(new_state());
  XXH3_64bits_reset(state_.get());
}

void Hash64::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

uint64_t Hash64::digest() const {
  return XXH3_64bits_digest(state_.get());
}

Hash128::Hash128() {
  state_.reset(new_state());
  XXH3_128bits_reset(state_.get());
}

void Hash128::add(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
}

void Hash128::add(std::string_view text) {
  add(static_cast<uint64_t>(text.size()));
  add(std::as_bytes(std::span(text)));
}

void Hash128::add(uint64_t number) {
  std::byte bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(number >> (8 * i));
  add(std::span<const std::byte>(bytes));
}

void Hash128::add(const Digest128& digest) {
  add(digest.high);
  add(digest.low);
}

Digest128 Hash128::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
  return {hash.high64, hash.low64};
}

void PieceHash::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t part = std::min(bytes.size(), kPieceBytes - filled_);
    piece_.add(bytes.first(part));
    filled_ += part;
    bytes = bytes.subspan(part);
    if (filled_ == kPieceBytes) close_piece();
  }
}

void PieceHash::close_piece() {
  all_.add(piece_.digest());
  piece_ = Hash128();
  filled_ = 0;
}

Digest128 PieceHash::digest() {
  if (filled_ > 0) close_piece();
  return all_.digest();
}

uint64_t hash64(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace shardrun
