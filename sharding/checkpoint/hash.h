// XXH3 as checkpoints use it: 64 bits for a chunk's bytes, 128 bits for what is compared between
// runs. Digests do not depend on how the bytes were cut into calls, nor on the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace shardrun {

struct Digest128 {
  uint64_t high = 0, low = 0;
  std::string hex() const;  // 32 digits
  friend bool operator==(const Digest128&, const Digest128&) = default;
};

// A running XXH3.
class HashState {
 public:
  HashState(HashState&&) noexcept = default;
  HashState& operator=(HashState&&) noexcept = default;

 protected:
  HashState() = default;
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

class Hash64 : public HashState {
 public:
  Hash64();
  void add(std::span<const std::byte> bytes);
  uint64_t digest() const;
};

class Hash128 : public HashState {
 public:
  Hash128();
  void add(std::span<const std::byte> bytes);
  // Framed: a text by its length, a number as 8 bytes in little endian, a digest high half first.
  void add(std::string_view text);
  void add(const char* text) { add(std::string_view(text)); }
  void add(uint64_t number);
  void add(const Digest128& digest);
  Digest128 digest() const;
};

// The digest of the digests of fixed pieces, of which only the last may be shorter.
class PieceHash {
 public:
  static constexpr size_t kPieceBytes = size_t{1} << 20;
  void add(std::span<const std::byte> bytes);
  Digest128 digest();  // ends it

 private:
  void close_piece();
  Hash128 piece_, all_;
  size_t filled_ = 0;
};

uint64_t hash64(std::span<const std::byte> bytes);

}  // namespace shardrun
