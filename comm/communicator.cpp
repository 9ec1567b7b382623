// What all transports share: the checks at the boundary, the count of traffic, and the order in
// which leaves are folded. Transports (thread_, mpi_, meta_communicator.cpp) move bytes.
#include "comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/elementwise.h"

namespace shardrun {

namespace {

// A rank without a leaf has an idle stream, on which kernels leave memory alone; but the slices
// that it owns are summed here like everybody's.
class Working {
 public:
  explicit Working(Stream& stream) : stream_(stream), idle_(stream.idle()) {
    stream_.set_idle(false);
  }
  ~Working() { stream_.set_idle(idle_); }
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;

 private:
  Stream& stream_;
  bool idle_;
};

kernels::FoldMode mode_of(bool first) {
  return first ? kernels::FoldMode::assign : kernels::FoldMode::add;
}

void check_window(const LeafWindow& window, int size) {
  SHARDRUN_CHECK(window.count >= 0 && window.count <= size, "window has {} leaves, wanted 0 to {}",
                 window.count, size);
  SHARDRUN_CHECK(window.first >= 0 && window.first + window.count <= window.total,
                 "window [{}, {}) of a step of {} leaves", window.first,
                 window.first + window.count, window.total);
  SHARDRUN_CHECK(window.sum_block >= 1, "sum block is {}, wanted >= 1", window.sum_block);
}

void check_sum(const ConstTensor& sum, const char* name, int64_t count) {
  SHARDRUN_CHECK(sum.present() && sum.dtype() == Dtype::fp32 && sum.numel() == count,
                 "{}: {} {}, wanted fp32 [{}]", name, name_of(sum.dtype()), sum.shape().text(),
                 count);
}

void check_wire(Dtype wire, const char* name) {
  SHARDRUN_CHECK(wire == Dtype::fp32 || wire == Dtype::bf16 || wire == Dtype::fp16,
                 "{} is {}, wanted fp32, bf16 or fp16", name, name_of(wire));
}

// Elements of one rank's slice of `full`.
int64_t slice_count(const ConstTensor& full, const char* name, int size) {
  SHARDRUN_CHECK(full.present(), "{} is absent: every rank gives its dtype and shape", name);
  SHARDRUN_CHECK(full.numel() % size == 0, "{} has {} elements, wanted a multiple of {} ranks",
                 name, full.numel(), size);
  return full.numel() / size;
}

}  // namespace

void Communicator::check_stream(const Stream& stream) const {
  SHARDRUN_CHECK(serves(stream.kind()), "communicator \"{}\" got a stream of kind {}", transport(),
                 name_of(stream.kind()));
}

void Communicator::check_data(const ConstTensor& tensor, const char* name) const {
  SHARDRUN_CHECK(!moves_data() || tensor.bytes() == 0 || tensor.data() != nullptr,
                 "{} {} has no memory", name, tensor.shape().text());
}

void Communicator::count_call(double sent, double received) {
  traffic_.sent_bytes += sent;
  traffic_.received_bytes += received;
  ++traffic_.calls;
}

void Communicator::all_gather(Tensor full, ConstTensor shard, Stream& stream) {
  check_stream(stream);
  SHARDRUN_CHECK(full.present() && shard.present() && full.dtype() == shard.dtype() &&
                     full.numel() == shard.numel() * size_,
                 "all_gather of {} {} into {} {} over {} ranks", name_of(shard.dtype()),
                 shard.shape().text(), name_of(full.dtype()), full.shape().text(), size_);
  check_data(full, "all_gather: full");
  check_data(shard, "all_gather: shard");
  const double moved = static_cast<double>(shard.bytes()) * (size_ - 1);
  count_call(moved, moved);
  if (size_ == 1 && full.data() == shard.data()) return;
  do_all_gather(static_cast<std::byte*>(full.data()), static_cast<const std::byte*>(shard.data()),
                shard.bytes(), stream);
}

void Communicator::exchange_sum(SliceSum sum, Tensor found, ConstTensor leaf,
                                const LeafWindow& window, Memory& memory, Stream& stream) {
  check_stream(stream);
  check_window(window, size_);
  const int64_t count = slice_count(leaf, "exchange_sum: leaf", size_);
  const Dtype wire = leaf.dtype();
  check_wire(wire, "exchange_sum: leaf");
  check_sum(sum.total, "exchange_sum: total", count);
  check_data(sum.total, "exchange_sum: total");
  check_data(found, "exchange_sum: found");
  const bool blocks = window.sum_block > 1;
  if (blocks) {
    check_sum(sum.block, "exchange_sum: block", count);
    check_data(sum.block, "exchange_sum: block");
  }
  const bool sends = rank_ < window.count;
  if (sends) check_data(leaf, "exchange_sum: leaf");

  const size_t slice_bytes = static_cast<size_t>(count) * size_of(wire);
  const int senders = static_cast<int>(window.count);
  count_call(sends ? static_cast<double>(slice_bytes) * (size_ - 1) : 0,
             static_cast<double>(slice_bytes) * (senders - (sends ? 1 : 0)));

  Working working(stream);
  do_exchange(
      sends ? static_cast<const std::byte*>(leaf.data()) : nullptr, slice_bytes, senders, memory,
      [&](int source, const std::byte* slice) {
        const int64_t number = window.first + source;
        const ConstTensor incoming(slice, wire, Shape{count});
        const int64_t tag = kernels::place_tag(number, rank_ * count);
        if (!blocks) {
          kernels::fold(sum.total, incoming, mode_of(number == 0), found, tag, stream);
          return;
        }
        const int64_t place = number % window.sum_block;
        kernels::fold(sum.block, incoming, mode_of(place == 0), found, tag, stream);
        if (place + 1 < window.sum_block && number + 1 < window.total) return;
        const bool first_block = number < window.sum_block;
        kernels::fold(sum.total, sum.block, mode_of(first_block), found, tag, stream);
      },
      stream);
}

void Communicator::exchange_blocks(Tensor total, Tensor found, ConstTensor block, int64_t blocks,
                                   Memory& memory, Stream& stream) {
  check_stream(stream);
  SHARDRUN_CHECK(blocks >= 1 && blocks <= size_, "exchange_blocks of {} blocks over {} ranks",
                 blocks, size_);
  const int64_t count = slice_count(block, "exchange_blocks: block", size_);
  check_sum(block, "exchange_blocks: block", count * size_);
  check_sum(total, "exchange_blocks: total", count);
  check_data(total, "exchange_blocks: total");
  check_data(found, "exchange_blocks: found");
  const bool sends = rank_ < blocks;
  if (sends) check_data(block, "exchange_blocks: block");

  const size_t slice_bytes = static_cast<size_t>(count) * sizeof(float);
  const int senders = static_cast<int>(blocks);
  count_call(sends ? static_cast<double>(slice_bytes) * (size_ - 1) : 0,
             static_cast<double>(slice_bytes) * (senders - (sends ? 1 : 0)));

  Working working(stream);
  do_exchange(
      sends ? static_cast<const std::byte*>(block.data()) : nullptr, slice_bytes, senders, memory,
      [&](int source, const std::byte* slice) {
        const ConstTensor incoming(slice, Dtype::fp32, Shape{count});
        kernels::fold(total, incoming, mode_of(source == 0), found,
                      kernels::place_tag(source, rank_ * count), stream);
      },
      stream);
}

void Communicator::reduce_scatter(Tensor shard, ConstTensor full, Memory& memory, Stream& stream) {
  check_stream(stream);
  const int64_t count = slice_count(full, "reduce_scatter: full", size_);
  check_wire(full.dtype(), "reduce_scatter: full");
  check_sum(shard, "reduce_scatter: shard", count);
  check_data(full, "reduce_scatter: full");
  check_data(shard, "reduce_scatter: shard");
  Working working(stream);
  OwnedTensor widened;
  if (!reduces(full.dtype())) {
    widened = allocate_tensor(memory, Dtype::fp32, Shape{count * size_}, "widened leaf");
    kernels::cast(widened.tensor, full, stream);
    full = widened.tensor;
  }
  const double moved = static_cast<double>(count * size_of(full.dtype())) * (size_ - 1);
  count_call(moved, moved);
  do_reduce_scatter(static_cast<float*>(shard.data()), full.data(), full.dtype(), count, memory,
                    stream);
}

void Communicator::native_sum(Tensor total, Tensor found, Tensor leaf, const LeafWindow& window,
                              Memory& memory, Stream& stream) {
  check_stream(stream);
  check_window(window, size_);
  const int64_t count = slice_count(leaf, "native_sum: leaf", size_);
  check_sum(total, "native_sum: total", count);
  check_data(total, "native_sum: total");
  check_data(found, "native_sum: found");
  Working working(stream);
  if (rank_ >= window.count) kernels::fill(leaf, 0, stream);
  const OwnedTensor sum = allocate_tensor(memory, Dtype::fp32, Shape{count}, "native sum");
  reduce_scatter(sum.tensor, leaf, memory, stream);
  kernels::fold(total, sum.tensor, mode_of(window.first == 0), found,
                kernels::place_tag(window.first, rank_ * count), stream);
}

void Communicator::all_reduce_sum(std::span<int64_t> values) {
  const double moved = size_ > 1 ? static_cast<double>(values.size_bytes()) : 0;
  count_call(moved, moved);
  do_all_reduce(values, false);
}

void Communicator::all_reduce_max(std::span<int64_t> values) {
  const double moved = size_ > 1 ? static_cast<double>(values.size_bytes()) : 0;
  count_call(moved, moved);
  do_all_reduce(values, true);
}

void Communicator::count_broadcast(size_t bytes, int root) {
  SHARDRUN_CHECK(root >= 0 && root < size_, "broadcast from rank {} of {}", root, size_);
  const double count = static_cast<double>(bytes);
  count_call(rank_ == root ? count * (size_ - 1) : 0, rank_ == root ? 0 : count);
}

void Communicator::broadcast(std::span<std::byte> bytes, int root) {
  count_broadcast(bytes.size(), root);
  do_broadcast_bytes(bytes.data(), bytes.size(), root);
}

void Communicator::broadcast(Tensor tensor, int root, Stream& stream) {
  check_stream(stream);
  SHARDRUN_CHECK(tensor.present(), "broadcast of an absent tensor");
  check_data(tensor, "broadcast: tensor");
  count_broadcast(tensor.bytes(), root);
  do_broadcast(static_cast<std::byte*>(tensor.data()), tensor.bytes(), root, stream);
}

void Communicator::all_gather_bytes(std::span<std::byte> all, std::span<const std::byte> mine) {
  SHARDRUN_CHECK(all.size() == mine.size() * static_cast<size_t>(size_),
                 "all_gather_bytes of {} bytes into {} over {} ranks", mine.size(), all.size(),
                 size_);
  const double moved = static_cast<double>(mine.size()) * (size_ - 1);
  count_call(moved, moved);
  do_all_gather_bytes(all.data(), mine.data(), mine.size());
}

void Communicator::exchange_bytes(std::span<const std::byte> mine, size_t slice_bytes, int senders,
                                  Memory& memory,
                                  FunctionRef<void(int source, const std::byte* slice)> take) {
  SHARDRUN_CHECK(senders >= 0 && senders <= size_, "exchange_bytes of {} over {} ranks", senders,
                 size_);
  const bool sends = rank_ < senders;
  SHARDRUN_CHECK(mine.size() == (sends ? slice_bytes * static_cast<size_t>(size_) : 0),
                 "exchange_bytes: {} bytes, wanted {} slices of {}", mine.size(), sends ? size_ : 0,
                 slice_bytes);
  count_call(sends ? static_cast<double>(slice_bytes) * (size_ - 1) : 0,
             static_cast<double>(slice_bytes) * (senders - (sends ? 1 : 0)));
  do_exchange_bytes(sends ? mine.data() : nullptr, slice_bytes, senders, memory, take);
}

void Communicator::synchronize(Stream& stream) {
  check_stream(stream);
  do_synchronize(stream);
}

void Communicator::barrier() {
  count_call(0, 0);
  do_barrier();
}

std::unique_ptr<Communicator> Communicator::split(int color) {
  SHARDRUN_CHECK(color >= 0, "split with colour {}, wanted >= 0", color);
  count_call(0, 0);
  return do_split(color);
}

std::optional<std::pair<int, int>> ranks_on_one_gpu(Communicator& host, const Device& device) {
  constexpr size_t kLongest = 64;
  const std::string& mine = device.info().uuid;
  SHARDRUN_CHECK(mine.size() <= kLongest, "a GPU calls itself {}", mine);
  std::vector<char> all(kLongest * host.size()), padded(kLongest, '\0');
  std::memcpy(padded.data(), mine.data(), mine.size());
  host.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(padded)));
  const auto uuid = [&](int rank) { return std::string_view(&all[rank * kLongest], kLongest); };
  for (int a = 0; a < host.size(); ++a) {
    for (int b = a + 1; b < host.size(); ++b) {
      if (uuid(a) == uuid(b)) return std::pair(a, b);
    }
  }
  return std::nullopt;
}

// ---- transports of host tensors

void Communicator::do_all_gather(std::byte* full, const std::byte* shard, size_t shard_bytes,
                                 Stream&) {
  do_all_gather_bytes(full, shard, shard_bytes);
}

void Communicator::do_exchange(const std::byte* mine, size_t slice_bytes, int senders,
                               Memory& memory,
                               FunctionRef<void(int source, const std::byte* slice)> take,
                               Stream&) {
  do_exchange_bytes(mine, slice_bytes, senders, memory, take);
}

void Communicator::do_broadcast(std::byte* bytes, size_t count, int root, Stream&) {
  do_broadcast_bytes(bytes, count, root);
}

void Communicator::shift_bytes(std::span<std::byte> from, std::span<const std::byte> mine,
                               int distance) {
  SHARDRUN_CHECK(distance > 0 && distance <= size_ && from.size() == mine.size(),
                 "shift_bytes of {} bytes into {} by {} over {} ranks", mine.size(), from.size(),
                 distance, size_);
  const double moved = distance == size_ ? 0 : static_cast<double>(mine.size());
  count_call(moved, moved);
  if (distance == size_) {
    std::copy(mine.begin(), mine.end(), from.begin());
  } else {
    do_shift_bytes(from.data(), mine.data(), mine.size(), distance);
  }
}

void Communicator::do_shift_bytes(std::byte* from, const std::byte* mine, size_t bytes,
                                  int distance) {
  constexpr size_t kBlock = size_t{64} << 10;
  std::vector<std::byte> all(std::min(kBlock, bytes) * static_cast<size_t>(size_));
  const auto source = static_cast<size_t>((rank_ + size_ - distance) % size_);
  for (size_t at = 0; at < bytes; at += kBlock) {
    const size_t part = std::min(kBlock, bytes - at);
    do_all_gather_bytes(all.data(), mine + at, part);
    std::copy_n(all.begin() + static_cast<ptrdiff_t>(source * part), part, from + at);
  }
}

}  // namespace shardrun
