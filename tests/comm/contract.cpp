#include "tests/comm/contract.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "comm/exact_sum.h"
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

struct Host {
  ThreadPool pool{1};
  Stream stream{DeviceKind::cpu, Isa::baseline, &pool};
  std::unique_ptr<Memory> memory = make_heap_memory();
};

Tensor tensor_of(std::vector<float>& values) {
  return {values.data(), Dtype::fp32, Shape{static_cast<int64_t>(values.size())}};
}

// Where an exchange says what was not finite.
struct Found {
  int64_t place = kernels::kNothingFound;
  Tensor tensor() { return {&place, Dtype::int64, Shape{1}}; }
  kernels::NonFinite read() const { return kernels::place_of(place); }
};

// A whole step: `total` leaves in windows of `width`, slices of n elements.
void sum_a_step(Communicator& comm, Host& host, Dtype wire, int64_t n, int64_t total, int64_t width,
                int64_t sum_block) {
  const int64_t size = comm.size();
  std::vector<Bytes> leaves;
  for (int64_t l = 0; l < total; ++l) leaves.push_back(make_leaf(l, n * size, wire));

  std::vector<float> sum(n, 123.0f), block(n, 456.0f);  // must be assigned, not added to
  for (int64_t first = 0; first < total; first += width) {
    const LeafWindow window{first, std::min(width, total - first), total, sum_block};
    const bool brings = comm.rank() < window.count;
    const ConstTensor leaf(brings ? leaves[first + comm.rank()].data() : nullptr, wire,
                           Shape{n * size});
    host.stream.set_idle(!brings);
    Found found;
    comm.exchange_sum({tensor_of(sum), sum_block > 1 ? tensor_of(block) : Tensor()}, found.tensor(),
                      leaf, window, *host.memory, host.stream);
    SHARDRUN_CHECK(found.read().leaf == -1, "leaf {} called not finite", found.read().leaf);
    SHARDRUN_CHECK(host.stream.idle() == !brings, "idle was not restored");
    host.stream.set_idle(false);
  }
  for (int64_t i = 0; i < n; ++i) {
    require_same_bits(sum[i], canonical(leaves, wire, comm.rank() * n + i, sum_block),
                      "exchange_sum", i);
  }
}

void exchange_sum_has_canonical_bits(Communicator& comm) {
  Host host;
  const int64_t size = comm.size();
  for (Dtype wire : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    for (int64_t n : {0, 256, 7 * 256}) {
      for (int64_t sum_block : {1, 2, 3}) {
        for (int64_t total : {int64_t{1}, size, 2 * size + 1, int64_t{7}}) {
          sum_a_step(comm, host, wire, n, total, size, sum_block);
        }
      }
    }
  }
  // Windows narrower than the world, slices that are no whole block.
  for (int64_t width = 1; width <= size; ++width)
    sum_a_step(comm, host, Dtype::bf16, 13, 7, width, 2);
}

void exchange_sum_larger_than_eager_messages(Communicator& comm) {
  Host host;
  sum_a_step(comm, host, Dtype::fp32, 257 * 256, comm.size(), comm.size(), 1);
}

void exchange_sum_finds_the_first_that_is_not_finite(Communicator& comm) {
  Host host;
  const int64_t n = 512, size = comm.size();
  const int64_t bad = size - 1;  // the last leaf is spoilt, in every slice
  std::vector<float> leaf(n * size, 1.0f), sum(n);
  if (comm.rank() == bad) {
    for (int64_t r = 0; r < size; ++r) {
      leaf[r * n + 40 + r] = std::numeric_limits<float>::infinity();
      leaf[r * n + 50 + r] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  Found first;
  comm.exchange_sum({tensor_of(sum), {}}, first.tensor(), tensor_of(leaf), {0, size, size, 1},
                    *host.memory, host.stream);
  kernels::NonFinite found = first.read();
  const int64_t own = comm.rank() * n;
  SHARDRUN_CHECK(found.leaf == bad && found.element == own + 40 + comm.rank() && !found.nan,
                 "found leaf {}, element {}, nan {}", found.leaf, found.element, found.nan);

  // Finite leaves whose sum is not: leaf 1 is the one that overflows.
  if (size < 2) return;
  leaf.assign(n * size, 1.0f);
  for (int64_t r = 0; r < size; ++r) leaf[r * n + 3] = std::numeric_limits<float>::max();
  Found second;
  comm.exchange_sum({tensor_of(sum), {}}, second.tensor(), tensor_of(leaf), {0, size, size, 1},
                    *host.memory, host.stream);
  found = second.read();
  SHARDRUN_CHECK(found.leaf == 1 && found.element == own + 3 && !found.nan,
                 "found leaf {}, element {}", found.leaf, found.element);
}

void exchange_blocks_folds_in_order(Communicator& comm) {
  Host host;
  const int64_t n = 3 * 256, size = comm.size();
  for (int64_t blocks = 1; blocks <= size; ++blocks) {
    std::vector<Bytes> sums;
    for (int64_t b = 0; b < blocks; ++b) sums.push_back(make_leaf(b, n * size, Dtype::fp32));
    const bool brings = comm.rank() < blocks;
    const ConstTensor block(brings ? sums[comm.rank()].data() : nullptr, Dtype::fp32,
                            Shape{n * size});
    std::vector<float> total(n, 9.0f);
    Found found;
    comm.exchange_blocks(tensor_of(total), found.tensor(), block, blocks, *host.memory,
                         host.stream);
    SHARDRUN_CHECK(found.read().leaf == -1, "block {} called not finite", found.read().leaf);
    for (int64_t i = 0; i < n; ++i) {
      require_same_bits(total[i], canonical(sums, Dtype::fp32, comm.rank() * n + i, 1),
                        "exchange_blocks", i);
    }
  }
}

void all_gather_in_rank_order(Communicator& comm) {
  Host host;
  const int64_t size = comm.size();
  for (int64_t n : {0, 1, 256, 70001}) {
    std::vector<float> full(n * size, -1.0f), shard(n);
    for (int64_t i = 0; i < n; ++i) shard[i] = value_at(comm.rank(), i);
    const auto require_all = [&] {
      for (int64_t i = 0; i < n * size; ++i) {
        require_same_bits(full[i], value_at(i / n, i % n), "all_gather", i);
      }
    };
    comm.all_gather(tensor_of(full), tensor_of(shard), host.stream);
    require_all();
    // In place.
    std::fill(full.begin(), full.end(), -1.0f);
    std::copy(shard.begin(), shard.end(), full.begin() + comm.rank() * n);
    comm.all_gather(tensor_of(full), tensor_of(full).flat(comm.rank() * n, n), host.stream);
    require_all();
  }
}

void all_gather_of_bytes(Communicator& comm) {
  std::vector<char> mine(5, static_cast<char>('a' + comm.rank())), all(5 * comm.size());
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(mine)));
  for (size_t i = 0; i < all.size(); ++i) {
    SHARDRUN_CHECK(all[i] == static_cast<char>('a' + i / 5), "byte {} is '{}'", i, all[i]);
  }
}

void reduce_scatter_within_rounding(Communicator& comm) {
  Host host;
  const int64_t n = 5 * 256, size = comm.size();
  std::vector<float> full(n * size), shard(n);
  for (int64_t i = 0; i < n * size; ++i) full[i] = value_at(comm.rank(), i);
  comm.reduce_scatter(tensor_of(shard), tensor_of(full), *host.memory, host.stream);
  for (int64_t i = 0; i < n; ++i) {
    double wanted = 0, magnitude = 0;
    for (int64_t r = 0; r < size; ++r) {
      wanted += value_at(r, comm.rank() * n + i);
      magnitude += std::abs(value_at(r, comm.rank() * n + i));
    }
    SHARDRUN_CHECK(std::abs(shard[i] - wanted) <= magnitude * size * 0x1p-23,
                   "reduce_scatter: element {} is {}, wanted {}", i, shard[i], wanted);
  }
}

void all_reduce_of_integers(Communicator& comm) {
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

void all_reduce_of_exact_sums(Communicator& comm) {
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

void broadcast_from_every_root(Communicator& comm) {
  Host host;
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<float> values(1000);
    for (int64_t i = 0; i < 1000; ++i) values[i] = value_at(comm.rank(), i);
    comm.broadcast(tensor_of(values), root, host.stream);
    for (int64_t i = 0; i < 1000; ++i) {
      require_same_bits(values[i], value_at(root, i), "broadcast", i);
    }
    comm.broadcast(std::span<std::byte>(), root);
  }
}

void split_by_colour(Communicator& comm) {
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
  // Again, with the same colours and then of the part itself: the groups must not be mixed up.
  const std::unique_ptr<Communicator> again = comm.split(color);
  const std::unique_ptr<Communicator> alone = part->split(part->rank());
  SHARDRUN_CHECK(alone->size() == 1 && again->size() == part->size(), "{} ranks in a part of one",
                 alone->size());
  alone->barrier();
  again->barrier();
}

void counts_traffic(Communicator& comm) {
  Host host;
  const Traffic before = comm.traffic();
  const int64_t size = comm.size(), n = 256;
  std::vector<float> full(n * size), shard(n);
  comm.all_gather(tensor_of(full), tensor_of(shard), host.stream);
  const LeafWindow first_only{0, 1, 1, 1};
  Found found;
  comm.exchange_sum({tensor_of(shard), {}}, found.tensor(), tensor_of(full), first_only,
                    *host.memory, host.stream);
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
void refuses_wrong_arguments(Communicator& comm) {
  Host host;
  std::vector<float> full(256 * comm.size()), shard(255);
  Found found;
  const auto require_throws = [](const char* what, auto&& call) {
    try {
      call();
    } catch (const InternalError&) {
      return;
    }
    SHARDRUN_CHECK(false, "{} was let through", what);
  };
  require_throws("a shard of the wrong size",
                 [&] { comm.all_gather(tensor_of(full), tensor_of(shard), host.stream); });
  require_throws("a window wider than the world", [&] {
    const int64_t leaves = comm.size() + 1;
    std::vector<float> sum(256);
    comm.exchange_sum({tensor_of(sum), {}}, found.tensor(), tensor_of(full), {0, leaves, leaves, 1},
                      *host.memory, host.stream);
  });
  require_throws("a sum block without its accumulator", [&] {
    std::vector<float> sum(256);
    comm.exchange_sum({tensor_of(sum), {}}, found.tensor(), tensor_of(full), {0, 1, 1, 2},
                      *host.memory, host.stream);
  });
  require_throws("a root outside the world", [&] { comm.broadcast({}, comm.size()); });
  comm.barrier();
}

constexpr ContractCase kCases[] = {
    {"exchange_sum_has_canonical_bits", exchange_sum_has_canonical_bits},
    {"exchange_sum_larger_than_eager_messages", exchange_sum_larger_than_eager_messages},
    {"exchange_sum_finds_the_first_that_is_not_finite",
     exchange_sum_finds_the_first_that_is_not_finite},
    {"exchange_blocks_folds_in_order", exchange_blocks_folds_in_order},
    {"all_gather_in_rank_order", all_gather_in_rank_order},
    {"all_gather_of_bytes", all_gather_of_bytes},
    {"reduce_scatter_within_rounding", reduce_scatter_within_rounding},
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
