// Device tensors over a transport of host tensors: several ranks on one GPU, and GPUs without NCCL.
// Called as any communicator; between it and the others stands `host`.
//
// [Note: pieces] A call goes in pieces of every slice, and alternates between two pairs of pinned
// buffers. While the host carries piece i to the other ranks, piece i + 1 comes off the GPU and piece
// i - 1 goes onto it:
//
//   stream   out 0 | out 1 |      in 0 | out 2 |      in 1 | ...
//   host            send 0 ........ | send 1 ........ | ...
//
// The host waits for "out i" before it sends, and for "in i - 2" before it receives into the same
// buffer again, also across calls and streams. A rank that sends nothing waits for no "out".
#include <cstring>

#include "comm/chunks.h"
#include "comm/communicator.h"

namespace shardrun {

namespace {

constexpr size_t kInnerBytes = kStagedBufferBytes;  // of what the host transport stages in

// How long a piece of one slice is: W of them fill a buffer.
size_t piece_bytes(int size) {
  const size_t piece =
      kStagedBufferBytes / static_cast<size_t>(size) / Memory::kAlignment * Memory::kAlignment;
  SHARDRUN_CHECK(piece > 0, "staged: {} ranks share a buffer of {} bytes", size,
                 kStagedBufferBytes);
  return piece;
}

// Memory for the exchanges of `host`, which stages one piece at a time: one block, handed out whole.
class OneBlock : public Memory {
 public:
  explicit OneBlock(HostBuffer block) : block_(std::move(block)) {}
  void begin(const char*) override {}
  void end() override {}

 private:
  Buffer do_allocate(size_t bytes, const char* label) override {
    SHARDRUN_CHECK(!taken_ && bytes <= block_.bytes(), "{}: {} bytes of {}, {}", label, bytes,
                   block_.bytes(), taken_ ? "taken" : "free");
    taken_ = true;
    return Buffer(this, block_.data(), bytes, 0);
  }
  void do_free(const Buffer&) override { taken_ = false; }

  HostBuffer block_;
  bool taken_ = false;
};

class StagedCommunicator : public Communicator {
 public:
  StagedCommunicator(Communicator& host, std::unique_ptr<Communicator> owned, Device& device)
      : Communicator(host.rank(), host.size()),
        owned_(std::move(owned)),
        host_(host),
        device_(device),
        name_(std::string("staged:") + host.transport()),
        piece_(piece_bytes(host.size())),
        inner_(HostBuffer(&device, kInnerBytes, "the staging of the host transport")),
        host_stream_(DeviceKind::cpu, Isa::baseline, nullptr) {
    for (Pair& pair : pairs_) {
      pair.send = HostBuffer(&device, kStagedBufferBytes, "staged sends");
      pair.receive = HostBuffer(&device, kStagedBufferBytes, "staged receives");
    }
  }

  // The GPU may still read what was received last, and write what a failed call was to send.
  ~StagedCommunicator() override {
    for (Pair& pair : pairs_) {
      try {
        pair.in.synchronize();
        pair.out.synchronize();
      } catch (const Error&) {
        // The device is broken; whoever works on it says so.
      }
    }
  }

  const char* transport() const override { return name_.c_str(); }
  void abort(const std::string& message) noexcept override { host_.abort(message); }
  void require_alive() const override { host_.require_alive(); }

 private:
  struct Pair {
    HostBuffer send, receive;
    Event out;  // the bytes to send have come off the GPU
    Event in;   // the bytes received are on the GPU
  };

  bool serves(DeviceKind kind) const override { return kind != DeviceKind::meta; }

  // Runs `total` bytes of a slice through the pairs, see [Note: pieces]. out() and in() queue copies
  // and say whether there were any, carry() moves between hosts; each is given the pair and the piece.
  template <typename Out, typename Carry, typename In>
  void in_pieces(size_t total, Stream& stream, Out&& out, Carry&& carry, In&& in) {
    const auto begin = [&](size_t offset) {
      Pair& pair = pairs_[(next_ + offset / piece_) % 2];
      if (out(pair, offset, std::min(piece_, total - offset))) pair.out.record(stream);
    };
    if (total > 0) begin(0);
    for_each_chunk(total, piece_, [&](size_t offset, size_t bytes) {
      if (offset + bytes < total) begin(offset + bytes);
      Pair& pair = pairs_[(next_ + offset / piece_) % 2];
      pair.out.synchronize();
      pair.in.synchronize();
      carry(pair, offset, bytes);
      if (in(pair, offset, bytes)) pair.in.record(stream);
    });
    next_ = (next_ + (total + piece_ - 1) / piece_) % 2;
  }

  void copy(void* to, const void* from, size_t bytes, Stream& stream) {
    if (bytes > 0) device_.copy(to, from, bytes, stream.handle());
  }

  void do_all_gather(std::byte* full, const std::byte* shard, size_t shard_bytes,
                     Stream& stream) override {
    if (!stream.device()) return do_all_gather_bytes(full, shard, shard_bytes);
    in_pieces(
        shard_bytes, stream,
        [&](Pair& pair, size_t offset, size_t bytes) {
          copy(pair.send.data(), shard + offset, bytes, stream);
          return true;
        },
        [&](Pair& pair, size_t, size_t bytes) {
          host_.all_gather_bytes({pair.receive.data(), bytes * size()}, {pair.send.data(), bytes});
        },
        [&](Pair& pair, size_t offset, size_t bytes) {
          for (int r = 0; r < size(); ++r) {
            copy(full + r * shard_bytes + offset, pair.receive.data() + r * bytes, bytes, stream);
          }
          return true;
        });
  }

  // The slices come together in device memory of the plan and are folded there. A thread's peer reads
  // the pair's send buffer in place, and leaves the call when it has.
  void do_exchange(const std::byte* mine, size_t slice_bytes, int senders, Memory& memory,
                   FunctionRef<void(int source, const std::byte* slice)> take,
                   Stream& stream) override {
    if (!stream.device()) return do_exchange_bytes(mine, slice_bytes, senders, memory, take);
    const Staging layout(size(), slice_bytes);
    const Buffer staging = layout.allocate(memory);
    const auto slot_of = [&](int source) {
      return static_cast<std::byte*>(staging.data()) +
             layout.slot_of(source, rank()) * layout.slot_bytes;
    };
    const bool sends = mine != nullptr;
    const bool alone = size() == 1;
    in_pieces(
        alone ? 0 : slice_bytes, stream,
        [&](Pair& pair, size_t offset, size_t bytes) {
          for (int r = 0; r < size() && sends; ++r) {
            if (r == rank()) continue;
            copy(pair.send.data() + r * bytes, mine + r * slice_bytes + offset, bytes, stream);
          }
          return sends;
        },
        [&](Pair& pair, size_t, size_t bytes) {
          const size_t sent = sends ? bytes * static_cast<size_t>(size()) : 0;
          host_.exchange_bytes({pair.send.data(), sent}, bytes, senders, inner_,
                               [&](int source, const std::byte* slice) {
                                 if (source == rank()) return;
                                 std::memcpy(pair.receive.data() + source * bytes, slice, bytes);
                               });
        },
        [&](Pair& pair, size_t offset, size_t bytes) {
          for (int r = 0; r < senders; ++r) {
            if (r == rank()) continue;
            copy(slot_of(r) + offset, pair.receive.data() + r * bytes, bytes, stream);
          }
          return senders > (sends ? 1 : 0);
        });
    for (int r = 0; r < senders; ++r) {
      take(r, slice_bytes == 0 ? nullptr : r == rank() ? mine + r * slice_bytes : slot_of(r));
    }
  }

  void do_reduce_scatter(float* shard, const void* full, Dtype, int64_t count, Memory& memory,
                         Stream& stream) override {
    const auto tensor = [](const void* data, size_t bytes) {
      return Tensor(const_cast<void*>(data), Dtype::fp32,
                    Shape{static_cast<int64_t>(bytes / sizeof(float))});
    };
    const size_t slice_bytes = static_cast<size_t>(count) * sizeof(float);
    if (!stream.device()) {
      return host_.reduce_scatter(tensor(shard, slice_bytes), tensor(full, slice_bytes * size()),
                                  memory, stream);
    }
    std::byte* own = reinterpret_cast<std::byte*>(shard);
    const std::byte* all = static_cast<const std::byte*>(full);
    in_pieces(
        slice_bytes, stream,
        [&](Pair& pair, size_t offset, size_t bytes) {
          for (int r = 0; r < size(); ++r) {
            copy(pair.send.data() + r * bytes, all + r * slice_bytes + offset, bytes, stream);
          }
          return true;
        },
        [&](Pair& pair, size_t, size_t bytes) {
          host_.reduce_scatter(tensor(pair.receive.data(), bytes),
                               tensor(pair.send.data(), bytes * size()), inner_, host_stream_);
        },
        [&](Pair& pair, size_t offset, size_t bytes) {
          copy(own + offset, pair.receive.data(), bytes, stream);
          return true;
        });
  }

  // In the send buffers on the root, in the receive buffers elsewhere.
  void do_broadcast(std::byte* bytes, size_t count, int root, Stream& stream) override {
    if (!stream.device()) return do_broadcast_bytes(bytes, count, root);
    const bool sends = rank() == root;
    in_pieces(
        count, stream,
        [&](Pair& pair, size_t offset, size_t piece) {
          if (sends) copy(pair.send.data(), bytes + offset, piece, stream);
          return sends;
        },
        [&](Pair& pair, size_t, size_t piece) {
          host_.broadcast(std::span((sends ? pair.send : pair.receive).data(), piece), root);
        },
        [&](Pair& pair, size_t offset, size_t piece) {
          if (!sends) copy(bytes + offset, pair.receive.data(), piece, stream);
          return !sends;
        });
  }

  void do_all_gather_bytes(std::byte* all, const std::byte* mine, size_t bytes) override {
    host_.all_gather_bytes({all, bytes * size()}, {mine, bytes});
  }
  void do_exchange_bytes(const std::byte* mine, size_t slice_bytes, int senders, Memory& memory,
                         FunctionRef<void(int source, const std::byte* slice)> take) override {
    host_.exchange_bytes({mine, rank() < senders ? slice_bytes * size() : 0}, slice_bytes, senders,
                         memory, take);
  }
  void do_all_reduce(std::span<int64_t> values, bool max) override {
    max ? host_.all_reduce_max(values) : host_.all_reduce_sum(values);
  }
  void do_broadcast_bytes(std::byte* bytes, size_t count, int root) override {
    host_.broadcast(std::span(bytes, count), root);
  }
  void do_shift_bytes(std::byte* from, const std::byte* mine, size_t bytes, int distance) override {
    host_.shift_bytes({from, bytes}, {mine, bytes}, distance);
  }
  void do_barrier() override { host_.barrier(); }

  std::unique_ptr<Communicator> do_split(int color) override {
    std::unique_ptr<Communicator> part = host_.split(color);
    Communicator& host = *part;
    return std::make_unique<StagedCommunicator>(host, std::move(part), device_);
  }

  std::unique_ptr<Communicator> owned_;  // of a part that was split off: what host_ names
  Communicator& host_;
  Device& device_;
  std::string name_;
  size_t piece_;
  size_t next_ = 0;  // the pair of the next piece
  Pair pairs_[2];
  OneBlock inner_;
  Stream host_stream_;
};

}  // namespace

size_t staged_host_bytes(int size) {
  piece_bytes(size);
  return 4 * kStagedBufferBytes + kInnerBytes;
}

std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, Device& device) {
  return std::make_unique<StagedCommunicator>(host, nullptr, device);
}

}  // namespace shardrun
