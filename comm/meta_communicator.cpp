// A communicator for plans: nothing moves, every slice is null, and staging is asked for as the
// transport named by `like` would ask.
#include <cstring>

#include "comm/chunks.h"
#include "comm/communicator.h"

namespace shardrun {

namespace {

class MetaCommunicator : public Communicator {
 public:
  MetaCommunicator(int rank, int size, const std::string& like, bool stages, bool adds_16_bits)
      : Communicator(rank, size),
        name_("meta:" + like),
        stages_(stages),
        adds_16_bits_(adds_16_bits) {}

  const char* transport() const override { return name_.c_str(); }
  void abort(const std::string&) noexcept override {}
  void require_alive() const override {}

 private:
  bool serves(DeviceKind kind) const override { return kind == DeviceKind::meta; }

  // Tensors are null. Host bytes are not: every rank is taken to have brought the same.
  void do_all_gather(std::byte*, const std::byte*, size_t, Stream&) override {}
  void do_all_gather_bytes(std::byte* all, const std::byte* mine, size_t bytes) override {
    if (bytes == 0) return;
    for (int r = 0; r < size(); ++r) std::memcpy(all + r * bytes, mine, bytes);
  }

  void do_exchange(const std::byte*, size_t slice_bytes, int senders, Memory& memory,
                   FunctionRef<void(int source, const std::byte* slice)> take, Stream&) override {
    Buffer staging;
    if (stages_) staging = Staging(size(), slice_bytes).allocate(memory);
    for (int r = 0; r < senders; ++r) take(r, nullptr);
  }

  void do_exchange_bytes(const std::byte* mine, size_t slice_bytes, int senders, Memory&,
                         FunctionRef<void(int source, const std::byte* slice)> take) override {
    for (int r = 0; r < senders; ++r) {
      take(r, mine == nullptr ? nullptr : mine + rank() * slice_bytes);
    }
  }

  void do_reduce_scatter(float*, const void*, Dtype wire, int64_t count, Memory& memory,
                         Stream&) override {
    if (wire != Dtype::fp32) allocate_narrow_sum(memory, wire, count);
  }
  bool reduces(Dtype wire) const override { return wire == Dtype::fp32 || adds_16_bits_; }

  void do_all_reduce(std::span<int64_t> values, bool max) override {
    if (max) return;
    for (int64_t& value : values) {
      value = static_cast<int64_t>(static_cast<uint64_t>(value) * static_cast<uint64_t>(size()));
    }
  }

  void do_broadcast(std::byte*, size_t, int, Stream&) override {}
  void do_broadcast_bytes(std::byte*, size_t, int) override {}
  void do_barrier() override {}
  std::unique_ptr<Communicator> do_split(int color) override {
    throw CommError(
        "{}: split with colour {}, but the other ranks' colours are not known; make a "
        "meta communicator of the group's size",
        name_, color);
  }

  std::string name_;
  bool stages_;
  bool adds_16_bits_;
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& like) {
  SHARDRUN_CHECK(size >= 1 && rank >= 0 && rank < size, "rank {} of {}", rank, size);
  const bool stages = like == "mpi" || like == "staged" || like == "nccl";
  if (!stages && like != "thread") {
    throw UsageError("meta communicator like \"{}\", wanted thread, mpi, staged or nccl", like);
  }
  return std::make_unique<MetaCommunicator>(rank, size, like, stages, like == "nccl");
}

}  // namespace shardrun
