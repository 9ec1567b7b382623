#include "tests/comm/contract.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "comm/exact_sum.h"
#include "kernels/elementwise.h"
#include "runtime/random.h"

namespace shardrun::test {

namespace {

// Values of a leaf are a function of (leaf, element), whatever rank computes it. Their exponents
// differ enough that another order of addition shows in the bits.
float value_at(int64_t leaf, int64_t element) {
  const uint64_t bits = mix64(mix64(17, static_cast<uint64_t>(leaf)), element);
  const float mantissa = static_cast<float>(bits & 0xffffff) / 0x800000 - 1.0f;
  return std::ldexp(mantissa, static_cast<int>(bits >> 32 & 7) - 4);
}

// Elements as they lie in memory, in a wire dtype; `read` is the reference's own decoder.
using Bytes = std::vector<std::byte>;

uint16_t half_bits(float value) {
  // Truncation, for test data: normal numbers of fp16 only.
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | exponent << 10 | (bits >> 13 & 0x3ff));
}

void write(Bytes& bytes, Dtype wire, int64_t i, float value) {
  if (wire == Dtype::fp32) {
    std::memcpy(bytes.data() + 4 * i, &value, 4);
    return;
  }
  const uint16_t half = wire == Dtype::fp16
                            ? half_bits(value)
                            : static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  std::memcpy(bytes.data() + 2 * i, &half, 2);
}

float read(const Bytes& bytes, Dtype wire, int64_t i) {
  float value = 0;
  if (wire == Dtype::fp32) {
    std::memcpy(&value, bytes.data() + 4 * i, 4);
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, bytes.data() + 2 * i, 2);
  if (wire == Dtype::bf16) return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  const int exponent = half >> 10 & 0x1f;
  if (exponent == 0) return sign * 0.0f;
  return sign * std::ldexp(1.0f + static_cast<float>(half & 0x3ff) / 1024, exponent - 15);
}

Bytes make_leaf(int64_t leaf, int64_t count, Dtype wire) {
  Bytes bytes(static_cast<size_t>(count) * size_of(wire));
  for (int64_t i = 0; i < count; ++i) write(bytes, wire, i, value_at(leaf, i));
  return bytes;
}

// The definition of the canonical sum, for one element.
float canonical(const std::vector<Bytes>& leaves, Dtype wire, int64_t i, int64_t sum_block) {
  float total = 0;
  const int64_t count = static_cast<int64_t>(leaves.size());
  for (int64_t begin = 0; begin < count; begin += sum_block) {
    float block = read(leaves[begin], wire, i);
    for (int64_t l = begin + 1; l < std::min(begin + sum_block, count); ++l) {
      block = block + read(leaves[l], wire, i);
    }
    total = begin == 0 ? block : total + block;
  }
  return total;
}

void require_same_bits(float got, float wanted, const char* what, int64_t i) {
  SHARDRUN_CHECK(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(wanted),
                 "{}: element {} is {:a}, wanted {:a}", what, i, got, wanted);
}

// A tensor where the rank's tensors are, and its way there and back.
class Held {
 public:
  Held(Place& place, Dtype dtype, const Bytes& bytes)
      : place_(place),
        owned_(allocate_tensor(place.memory, dtype,
                               Shape{static_cast<int64_t>(bytes.size() / size_of(dtype))},
                               "contract")) {
    put(bytes);
  }
  Held(Place& place, const std::vector<float>& values)
      : Held(place, Dtype::fp32, bytes_of(values)) {}

  Tensor tensor() const { return owned_.tensor; }
  ConstTensor absent() const { return {nullptr, owned_.tensor.dtype(), owned_.tensor.shape()}; }

  void put(const Bytes& bytes) { copy_from_host(owned_.tensor, bytes.data(), place_.stream); }
  void put(const std::vector<float>& values) { put(bytes_of(values)); }

  template <typename T = float>
  std::vector<T> read(Communicator& comm) const {
    std::vector<T> values(static_cast<size_t>(owned_.tensor.numel()));
    comm.synchronize(place_.stream);
    copy_to_host(values.data(), owned_.tensor, place_.stream);
    comm.synchronize(place_.stream);
    return values;
  }

 private:
  static Bytes bytes_of(const std::vector<float>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return Bytes(bytes.begin(), bytes.end());
  }
  Place& place_;
  OwnedTensor owned_;
};

// Where an exchange says what was not finite.
class Found {
 public:
  explicit Found(Place& place) : held_(place, Dtype::int64, nothing()) {}
  Tensor tensor() const { return held_.tensor(); }
  kernels::NonFinite read(Communicator& comm) const {
    return kernels::place_of(held_.read<int64_t>(comm)[0]);
  }

 private:
  static Bytes nothing() {
    Bytes bytes(sizeof(int64_t));
    std::memcpy(bytes.data(), &kernels::kNothingFound, sizeof(int64_t));
    return bytes;
  }
  Held held_;
};

// A whole step: `total` leaves in windows of `width`, slices of n elements.
void sum_a_step(Communicator& comm, Place& place, Dtype wire, int64_t n, int64_t total,
                int64_t width, int64_t sum_block) {
  const int64_t size = comm.size();
  std::vector<Bytes> leaves;
  for (int64_t l = 0; l < total; ++l) leaves.push_back(make_leaf(l, n * size, wire));

  // Must be assigned, not added to.
  Held sum(place, std::vector<float>(n, 123.0f)), block(place, std::vector<float>(n, 456.0f));
  Held leaf(place, wire, Bytes(static_cast<size_t>(n * size) * size_of(wire)));
  Found found(place);
  for (int64_t first = 0; first < total; first += width) {
    const LeafWindow window{first, std::min(width, total - first), total, sum_block};
    const bool brings = comm.rank() < window.count;
    if (brings) leaf.put(leaves[first + comm.rank()]);
    place.stream.set_idle(!brings);
    comm.exchange_sum({sum.tensor(), sum_block > 1 ? block.tensor() : Tensor()}, found.tensor(),
                      brings ? leaf.tensor() : leaf.absent(), window, place.memory, place.stream);
    SHARDRUN_CHECK(place.stream.idle() == !brings, "idle was not restored");
    place.stream.set_idle(false);
  }
  const int64_t bad = found.read(comm).leaf;
  SHARDRUN_CHECK(bad == -1, "leaf {} called not finite", bad);
  const std::vector<float> got = sum.read(comm);
  for (int64_t i = 0; i < n; ++i) {
    require_same_bits(got[i], canonical(leaves, wire, comm.rank() * n + i, sum_block),
                      "exchange_sum", i);
  }
}

void exchange_sum_has_canonical_bits(Communicator& comm, Place& place) {
  const int64_t size = comm.size();
  for (Dtype wire : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (int64_t n : {0, 256, 7 * 256}) {
      for (int64_t sum_block : {1, 2, 3}) {
        for (int64_t total : {int64_t{1}, size, 2 * size + 1, int64_t{7}}) {
          sum_a_step(comm, place, wire, n, total, size, sum_block);
        }
      }
    }
  }
  // Windows narrower than the world, slices that are no whole block.
  for (int64_t width = 1; width <= size; ++width)
    sum_a_step(comm, place, Dtype::bf16, 13, 7, width, 2);
}

void exchange_sum_larger_than_eager_messages(Communicator& comm, Place& place) {
  sum_a_step(comm, place, Dtype::fp32, 257 * 256, comm.size(), comm.size(), 1);
}

// Three pieces of a staged transport, the last one short.
void exchange_sum_larger_than_staged_buffers(Communicator& comm, Place& place) {
  const int64_t piece = static_cast<int64_t>(kStagedBufferBytes / sizeof(float)) / comm.size();
  sum_a_step(comm, place, Dtype::fp32, 2 * piece + 13, comm.size(), comm.size(), 1);
}

void exchange_sum_finds_the_first_that_is_not_finite(Communicator& comm, Place& place) {
  const int64_t n = 512, size = comm.size();
  const int64_t bad = size - 1;  // the last leaf is spoilt, in every slice
  std::vector<float> leaf(n * size, 1.0f);
  if (comm.rank() == bad) {
    for (int64_t r = 0; r < size; ++r) {
      leaf[r * n + 40 + r] = std::numeric_limits<float>::infinity();
      leaf[r * n + 50 + r] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  Held sum(place, std::vector<float>(n)), held(place, leaf);
  Found first(place);
  comm.exchange_sum({sum.tensor(), {}}, first.tensor(), held.tensor(), {0, size, size, 1},
                    place.memory, place.stream);
  kernels::NonFinite found = first.read(comm);
  const int64_t own = comm.rank() * n;
  SHARDRUN_CHECK(found.leaf == bad && found.element == own + 40 + comm.rank() && !found.nan,
                 "found leaf {}, element {}, nan {}", found.leaf, found.element, found.nan);

  // Finite leaves whose sum is not: leaf 1 is the one that overflows.
  if (size < 2) return;
  leaf.assign(n * size, 1.0f);
  for (int64_t r = 0; r < size; ++r) leaf[r * n + 3] = std::numeric_limits<float>::max();
  held.put(leaf);
  Found second(place);
  comm.exchange_sum({sum.tensor(), {}}, second.tensor(), held.tensor(), {0, size, size, 1},
                    place.memory, place.stream);
  found = second.read(comm);
  SHARDRUN_CHECK(found.leaf == 1 && found.element == own + 3 && !found.nan,
                 "found leaf {}, element {}", found.leaf, found.element);
}

void exchange_blocks_folds_in_order(Communicator& comm, Place& place) {
  const int64_t n = 3 * 256, size = comm.size();
  for (int64_t blocks = 1; blocks <= size; ++blocks) {
    std::vector<Bytes> sums;
    for (int64_t b = 0; b < blocks; ++b) sums.push_back(make_leaf(b, n * size, Dtype::fp32));
    const bool brings = comm.rank() < blocks;
    const Held block(place, Dtype::fp32, sums[brings ? comm.rank() : 0]);
    const Held total(place, std::vector<float>(n, 9.0f));
    const Found found(place);
    comm.exchange_blocks(total.tensor(), found.tensor(), brings ? block.tensor() : block.absent(),
                         blocks, place.memory, place.stream);
    const int64_t bad = found.read(comm).leaf;
    SHARDRUN_CHECK(bad == -1, "block {} called not finite", bad);
    const std::vector<float> got = total.read(comm);
    for (int64_t i = 0; i < n; ++i) {
      require_same_bits(got[i], canonical(sums, Dtype::fp32, comm.rank() * n + i, 1),
                        "exchange_blocks", i);
    }
  }
}

void all_gather_in_rank_order(Communicator& comm, Place& place) {
  const int64_t size = comm.size();
  for (int64_t n : {0, 1, 256, 70001}) {
    std::vector<float> shard(n);
    for (int64_t i = 0; i < n; ++i) shard[i] = value_at(comm.rank(), i);
    std::vector<float> before(n * size, -1.0f);
    const Held mine(place, shard);
    Held full(place, before);
    const auto require_all = [&] {
      const std::vector<float> got = full.read(comm);
      for (int64_t i = 0; i < n * size; ++i) {
        require_same_bits(got[i], value_at(i / n, i % n), "all_gather", i);
      }
    };
    comm.all_gather(full.tensor(), mine.tensor(), place.stream);
    require_all();
    // In place.
    std::copy(shard.begin(), shard.end(), before.begin() + comm.rank() * n);
    full.put(before);
    comm.all_gather(full.tensor(), full.tensor().flat(comm.rank() * n, n), place.stream);
    require_all();
  }
}

// What a call reads may be written next, what it writes may be read next, and nobody waits.
void calls_follow_one_another_on_the_stream(Communicator& comm, Place& place) {
  const int64_t size = comm.size(), n = 777, rounds = 5;
  const auto values = [&](int64_t round, int64_t rank) {
    std::vector<float> out(n);
    for (int64_t i = 0; i < n; ++i) out[i] = value_at(round * 100 + rank, i);
    return out;
  };
  Held shard(place, std::vector<float>(n)), leaf(place, std::vector<float>(n * size));
  std::vector<Held> fulls, sums;
  const Found found(place);
  for (int64_t round = 0; round < rounds; ++round) {
    fulls.emplace_back(place, std::vector<float>(n * size));
    sums.emplace_back(place, std::vector<float>(n));
    shard.put(values(round, comm.rank()));
    comm.all_gather(fulls.back().tensor(), shard.tensor(), place.stream);
    shard.put(std::vector<float>(n, -5.0f));
    comm.broadcast(shard.tensor(), static_cast<int>(round % size), place.stream);
    // Every rank brings the same leaf: what was gathered.
    kernels::copy_bytes(leaf.tensor(), fulls.back().tensor(), place.stream);
    comm.exchange_sum({sums.back().tensor(), {}}, found.tensor(), leaf.tensor(), {0, size, size, 1},
                      place.memory, place.stream);
    leaf.put(std::vector<float>(n * size, -7.0f));
  }
  for (int64_t round = 0; round < rounds; ++round) {
    const std::vector<float> full = fulls[round].read(comm), sum = sums[round].read(comm);
    for (int64_t i = 0; i < n * size; ++i) {
      require_same_bits(full[i], value_at(round * 100 + i / n, i % n), "all_gather", i);
    }
    const std::vector<float> own = values(round, comm.rank());
    for (int64_t i = 0; i < n; ++i) {
      float wanted = own[i];
      for (int64_t r = 1; r < size; ++r) wanted += own[i];
      require_same_bits(sum[i], wanted, "exchange_sum", i);
    }
  }
}

void all_gather_of_bytes(Communicator& comm, Place&) {
  std::vector<char> mine(5, static_cast<char>('a' + comm.rank())), all(5 * comm.size());
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(mine)));
  for (size_t i = 0; i < all.size(); ++i) {
    SHARDRUN_CHECK(all[i] == static_cast<char>('a' + i / 5), "byte {} is '{}'", i, all[i]);
  }
}

void shift_around_the_ring(Communicator& comm, Place&) {
  const int size = comm.size();
  for (const size_t count : {size_t{0}, size_t{1}, size_t{70001}, size_t{200000}}) {
    for (int distance = 1; distance <= size; ++distance) {
      std::vector<unsigned char> mine(count), from(count, 0xee);
      for (size_t i = 0; i < count; ++i) {
        mine[i] = static_cast<unsigned char>(i * 7 + static_cast<size_t>(comm.rank()) * 31);
      }
      comm.shift_bytes(std::as_writable_bytes(std::span(from)), std::as_bytes(std::span(mine)),
                       distance);
      const auto source = static_cast<size_t>((comm.rank() + size - distance) % size);
      for (size_t i = 0; i < count; ++i) {
        SHARDRUN_CHECK(from[i] == static_cast<unsigned char>(i * 7 + source * 31),
                       "shift by {}: byte {} of {}", distance, i, count);
      }
    }
  }
}

// The bound that communicator.h states for native sums, for one element.
double native_bound(double magnitude, int64_t size, Dtype wire) {
  const double w = static_cast<double>(size);
  if (wire == Dtype::fp32) return magnitude * w * 0x1p-23;
  if (wire == Dtype::bf16) return magnitude * w * 0x1p-8;
  return magnitude * w * 0x1p-11 + w * w * 0x1p-24;
}

void reduce_scatter_within_rounding(Communicator& comm, Place& place) {
  const int64_t size = comm.size();
  for (Dtype wire : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (int64_t n : {0, 1, 5 * 256 + 3}) {
      std::vector<Bytes> fulls;
      for (int64_t r = 0; r < size; ++r) fulls.push_back(make_leaf(r, n * size, wire));
      const Held full(place, wire, fulls[comm.rank()]), shard(place, std::vector<float>(n, 3.0f));
      comm.reduce_scatter(shard.tensor(), full.tensor(), place.memory, place.stream);
      const std::vector<float> got = shard.read(comm);
      for (int64_t i = 0; i < n; ++i) {
        double wanted = 0, magnitude = 0;
        for (int64_t r = 0; r < size; ++r) {
          const float x = read(fulls[r], wire, comm.rank() * n + i);
          wanted += x;
          magnitude += std::abs(x);
        }
        SHARDRUN_CHECK(std::abs(got[i] - wanted) <= native_bound(magnitude, size, wire),
                       "reduce_scatter of {}: element {} is {}, wanted {}", name_of(wire), i,
                       got[i], wanted);
      }
    }
  }
}

// A step of native sums, the last window not full: ranks without a leaf bring nothing.
void native_sum_of_a_step(Communicator& comm, Place& place) {
  const int64_t size = comm.size(), n = 300, total = 2 * size + 1;
  for (Dtype wire : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    std::vector<Bytes> leaves;
    for (int64_t l = 0; l < total; ++l) leaves.push_back(make_leaf(l, n * size, wire));
    const Held sum(place, std::vector<float>(n, 123.0f));
    Held leaf(place, wire, leaves[0]);
    const Found found(place);
    for (int64_t first = 0; first < total; first += size) {
      const LeafWindow window{first, std::min(size, total - first), total, 1};
      const bool brings = comm.rank() < window.count;
      if (brings) leaf.put(leaves[first + comm.rank()]);
      place.stream.set_idle(!brings);
      comm.native_sum(sum.tensor(), found.tensor(), leaf.tensor(), window, place.memory,
                      place.stream);
      place.stream.set_idle(false);
    }
    SHARDRUN_CHECK(found.read(comm).leaf == -1, "called not finite");
    const std::vector<float> got = sum.read(comm);
    for (int64_t i = 0; i < n; ++i) {
      double wanted = 0, magnitude = 0;
      for (const Bytes& bytes : leaves) {
        const float x = read(bytes, wire, comm.rank() * n + i);
        wanted += x;
        magnitude += std::abs(x);
      }
      SHARDRUN_CHECK(
          std::abs(got[i] - wanted) <= native_bound(magnitude, size, wire) + magnitude * 0x1p-22,
          "native_sum of {}: element {} is {}, wanted {}", name_of(wire), i, got[i], wanted);
    }
  }
}

// In fp16 a sum of large numbers is finite, and infinity is found in the slice where it is.
void native_sum_overflows_only_where_a_leaf_does(Communicator& comm, Place& place) {
  const int64_t size = comm.size(), n = 256;
  const auto leaf_of = [&](bool spoilt) {
    Bytes bytes(static_cast<size_t>(n * size) * 2);
    for (int64_t i = 0; i < n * size; ++i) write(bytes, Dtype::fp16, i, 60000.0f);
    const uint16_t infinity = 0x7c00;
    if (spoilt) std::memcpy(bytes.data() + 2 * (n * size - 7), &infinity, 2);
    return bytes;
  };
  for (bool spoilt : {false, true}) {
    const Held leaf(place, Dtype::fp16, leaf_of(spoilt && comm.rank() == 0));
    const Held sum(place, std::vector<float>(n));
    const Found found(place);
    comm.native_sum(sum.tensor(), found.tensor(), leaf.tensor(), {0, size, size, 1}, place.memory,
                    place.stream);
    const kernels::NonFinite at = found.read(comm);
    const bool here = spoilt && comm.rank() == size - 1;
    SHARDRUN_CHECK(at.leaf == (here ? 0 : -1), "found leaf {}", at.leaf);
    if (here) SHARDRUN_CHECK(at.element == n * size - 7 && !at.nan, "found element {}", at.element);
    const double wanted = 60000.0 * static_cast<double>(size);
    const float got = sum.read(comm)[0];
    SHARDRUN_CHECK(std::abs(got - wanted) <= native_bound(wanted, size, Dtype::fp16),
                   "sum {}, wanted {}", got, wanted);
  }
}

// Host bytes to each rank from the first `senders`.
void exchange_of_bytes(Communicator& comm, Place& place) {
  const auto memory = make_heap_memory();
  const int size = comm.size();
  for (int senders = 0; senders <= size; ++senders) {
    for (size_t n : {size_t{0}, size_t{5}, size_t{70001}}) {
      const bool sends = comm.rank() < senders;
      const auto byte_at = [](int from, int to, size_t i) {
        return static_cast<std::byte>(from * 37 + to * 11 + static_cast<int>(i % 251));
      };
      Bytes mine;
      for (int to = 0; to < size && sends; ++to) {
        for (size_t i = 0; i < n; ++i) mine.push_back(byte_at(comm.rank(), to, i));
      }
      int next = 0;
      comm.exchange_bytes(mine, n, senders, *memory, [&](int source, const std::byte* slice) {
        SHARDRUN_CHECK(source == next++, "source {} comes out of order", source);
        for (size_t i = 0; i < n; ++i) {
          SHARDRUN_CHECK(slice[i] == byte_at(source, comm.rank(), i), "byte {} of rank {}", i,
                         source);
        }
      });
      SHARDRUN_CHECK(next == senders, "{} of {} slices came", next, senders);
    }
  }
  comm.synchronize(place.stream);
}

void all_reduce_of_integers(Communicator& comm, Place&) {
  const int64_t size = comm.size(), rank = comm.rank();
  std::vector<int64_t> sum{rank + 1, -rank, int64_t{1} << 62, 5};
  comm.all_reduce_sum(sum);
  const int64_t wrapped = static_cast<int64_t>(static_cast<uint64_t>(size) * (uint64_t{1} << 62));
  const std::vector<int64_t> wanted{size * (size + 1) / 2, -size * (size - 1) / 2, wrapped,
                                    5 * size};
  SHARDRUN_CHECK(sum == wanted, "sums {}, {}, {}, {}", sum[0], sum[1], sum[2], sum[3]);

  std::vector<int64_t> max{rank, -rank, rank == size / 2 ? 100 : -100};
  comm.all_reduce_max(max);
  SHARDRUN_CHECK(max[0] == size - 1 && max[1] == 0 && max[2] == 100, "maxima {}, {}, {}", max[0],
                 max[1], max[2]);
  comm.all_reduce_sum({});
}

void all_reduce_of_exact_sums(Communicator& comm, Place&) {
  // Whatever the rank has, the sum has the bits of all numbers on one.
  ExactSum mine, all;
  for (int64_t i = 0; i < 1000; ++i) {
    const double value = std::ldexp(double{value_at(1, i)}, static_cast<int>(i % 200) * 5 - 500);
    all.add(value);
    if (i % comm.size() == comm.rank()) mine.add(value);
  }
  if (comm.rank() == 0) mine.add(std::numeric_limits<double>::quiet_NaN());
  comm.all_reduce_sum(mine.limbs());
  SHARDRUN_CHECK(mine.value() == all.value(), "{:a}, wanted {:a}", mine.value(), all.value());
  SHARDRUN_CHECK(mine.non_finite() == 1, "{} not finite", mine.non_finite());
}

void broadcast_from_every_root(Communicator& comm, Place& place) {
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<float> values(1000);
    for (int64_t i = 0; i < 1000; ++i) values[i] = value_at(comm.rank(), i);
    const Held held(place, values), empty(place, std::vector<float>());
    comm.broadcast(held.tensor(), root, place.stream);
    comm.broadcast(empty.tensor(), root, place.stream);
    values = held.read(comm);
    for (int64_t i = 0; i < 1000; ++i) {
      require_same_bits(values[i], value_at(root, i), "broadcast", i);
    }
    comm.broadcast(std::span<std::byte>(), root);
    int64_t number = comm.rank() + 5;
    comm.broadcast(std::as_writable_bytes(std::span(&number, 1)), root);
    SHARDRUN_CHECK(number == root + 5, "bytes of rank {}, wanted {}", number - 5, root);
  }
}

void split_by_colour(Communicator& comm, Place& place) {
  const int color = comm.rank() % 2;
  const std::unique_ptr<Communicator> part = comm.split(color);
  SHARDRUN_CHECK(part->rank() == comm.rank() / 2, "rank {} became {}", comm.rank(), part->rank());
  SHARDRUN_CHECK(part->size() == (comm.size() + 1 - color) / 2, "{} of {} have colour {}",
                 part->size(), comm.size(), color);
  std::vector<int64_t> sum{comm.rank()};
  part->all_reduce_sum(sum);
  int64_t wanted = 0;
  for (int r = color; r < comm.size(); r += 2) wanted += r;
  SHARDRUN_CHECK(sum[0] == wanted, "sum of the part is {}, wanted {}", sum[0], wanted);
  part->barrier();
  const Held mine(place, std::vector<float>(3, static_cast<float>(comm.rank())));
  const Held parts(place, std::vector<float>(3 * part->size()));
  part->all_gather(parts.tensor(), mine.tensor(), place.stream);
  const std::vector<float> got = parts.read(*part);
  for (int r = 0; r < part->size(); ++r) {
    require_same_bits(got[3 * r], static_cast<float>(color + 2 * r), "all_gather of a part", r);
  }
  // Again, with the same colours and then of the part itself: the groups must not be mixed up.
  const std::unique_ptr<Communicator> again = comm.split(color);
  const std::unique_ptr<Communicator> alone = part->split(part->rank());
  SHARDRUN_CHECK(alone->size() == 1 && again->size() == part->size(), "{} ranks in a part of one",
                 alone->size());
  alone->barrier();
  again->barrier();
}

void counts_traffic(Communicator& comm, Place& place) {
  const Traffic before = comm.traffic();
  const int64_t size = comm.size(), n = 256;
  const Held full(place, std::vector<float>(n * size)), shard(place, std::vector<float>(n));
  comm.all_gather(full.tensor(), shard.tensor(), place.stream);
  const LeafWindow first_only{0, 1, 1, 1};
  const Found found(place);
  comm.exchange_sum({shard.tensor(), {}}, found.tensor(), full.tensor(), first_only, place.memory,
                    place.stream);
  const double slices = static_cast<double>(n * 4 * (size - 1));
  const bool root = comm.rank() == 0;
  const Traffic& after = comm.traffic();
  SHARDRUN_CHECK(after.calls == before.calls + 2, "{} calls", after.calls - before.calls);
  SHARDRUN_CHECK(after.sent_bytes - before.sent_bytes == slices * (root ? 2 : 1), "sent {}",
                 after.sent_bytes - before.sent_bytes);
  SHARDRUN_CHECK(after.received_bytes - before.received_bytes == slices + (root ? 0 : n * 4),
                 "received {}", after.received_bytes - before.received_bytes);
}

// On all ranks alike and before anything moves, so that nobody is left waiting.
void refuses_wrong_arguments(Communicator& comm, Place& place) {
  const Held full(place, std::vector<float>(256 * comm.size()));
  const Held shard(place, std::vector<float>(255)), sum(place, std::vector<float>(256));
  const Found found(place);
  const auto require_throws = [](const char* what, auto&& call) {
    try {
      call();
    } catch (const InternalError&) {
      return;
    }
    SHARDRUN_CHECK(false, "{} was let through", what);
  };
  require_throws("a shard of the wrong size",
                 [&] { comm.all_gather(full.tensor(), shard.tensor(), place.stream); });
  require_throws("a window wider than the world", [&] {
    const int64_t leaves = comm.size() + 1;
    comm.exchange_sum({sum.tensor(), {}}, found.tensor(), full.tensor(), {0, leaves, leaves, 1},
                      place.memory, place.stream);
  });
  require_throws("a sum block without its accumulator", [&] {
    comm.exchange_sum({sum.tensor(), {}}, found.tensor(), full.tensor(), {0, 1, 1, 2}, place.memory,
                      place.stream);
  });
  require_throws("a stream of another kind", [&] {
    Stream meta(DeviceKind::meta, Isa::baseline, nullptr);
    comm.broadcast(sum.tensor(), 0, meta);
  });
  require_throws("bytes that are not W slices", [&] {
    comm.exchange_bytes({}, 3, comm.size(), place.memory, [](int, const std::byte*) {});
  });
  require_throws("a root outside the world", [&] { comm.broadcast({}, comm.size()); });
  comm.barrier();
}

constexpr ContractCase kCases[] = {
    {"exchange_sum_has_canonical_bits", exchange_sum_has_canonical_bits},
    {"exchange_sum_larger_than_eager_messages", exchange_sum_larger_than_eager_messages},
    {"exchange_sum_larger_than_staged_buffers", exchange_sum_larger_than_staged_buffers},
    {"exchange_sum_finds_the_first_that_is_not_finite",
     exchange_sum_finds_the_first_that_is_not_finite},
    {"exchange_blocks_folds_in_order", exchange_blocks_folds_in_order},
    {"all_gather_in_rank_order", all_gather_in_rank_order},
    {"shift_around_the_ring", shift_around_the_ring},
    {"calls_follow_one_another_on_the_stream", calls_follow_one_another_on_the_stream},
    {"all_gather_of_bytes", all_gather_of_bytes},
    {"exchange_of_bytes", exchange_of_bytes},
    {"reduce_scatter_within_rounding", reduce_scatter_within_rounding},
    {"native_sum_of_a_step", native_sum_of_a_step},
    {"native_sum_overflows_only_where_a_leaf_does", native_sum_overflows_only_where_a_leaf_does},
    {"all_reduce_of_integers", all_reduce_of_integers},
    {"all_reduce_of_exact_sums", all_reduce_of_exact_sums},
    {"broadcast_from_every_root", broadcast_from_every_root},
    {"split_by_colour", split_by_colour},
    {"counts_traffic", counts_traffic},
    {"refuses_wrong_arguments", refuses_wrong_arguments},
};

}  // namespace

std::span<const ContractCase> contract_cases() {
  return kCases;
}

}  // namespace shardrun::test
