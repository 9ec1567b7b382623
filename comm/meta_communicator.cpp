// A communicator for plans: nothing moves, every slice is null, and staging is asked for as the
// transport named by `like` would ask.
#include <cstring>

#include "comm/chunks.h"
#include "comm/communicator.h"

namespace shardrun {

namespace {

class MetaCommunicator : public Communicator {
 public:
  MetaCommunicator(int rank, int size, const std::string& like, bool stages)
      : Communicator(rank, size), name_("meta:" + like), stages_(stages) {}

  const char* transport() const override { return name_.c_str(); }
  void abort(const std::string&) noexcept override {}

 private:
  bool moves_data() const override { return false; }

  // Tensors are null. Host bytes are not: every rank is taken to have brought the same.
  void do_all_gather(std::byte* full, const std::byte* shard, size_t shard_bytes) override {
    if (full == nullptr || shard_bytes == 0) return;
    for (int r = 0; r < size(); ++r) std::memcpy(full + r * shard_bytes, shard, shard_bytes);
  }

  void do_exchange(const std::byte*, size_t slice_bytes, int senders, Memory& memory,
                   FunctionRef<void(int source, const std::byte* slice)> take) override {
    Buffer staging;
    if (stages_) staging = Staging(size(), slice_bytes).allocate(memory);
    for (int r = 0; r < senders; ++r) take(r, nullptr);
  }

  void do_reduce_scatter(float*, const float*, int64_t, Memory&) override {}

  void do_all_reduce(std::span<int64_t> values, bool max) override {
    if (max) return;
    for (int64_t& value : values) {
      value = static_cast<int64_t>(static_cast<uint64_t>(value) * static_cast<uint64_t>(size()));
    }
  }

  void do_broadcast(std::byte*, size_t, int) override {}
  void do_barrier() override {}
  std::unique_ptr<Communicator> do_split(int color) override {
    throw CommError(
        "{}: split with colour {}, but the other ranks' colours are not known; make a "
        "meta communicator of the group's size",
        name_, color);
  }

  std::string name_;
  bool stages_;
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& like) {
  SHARDRUN_CHECK(size >= 1 && rank >= 0 && rank < size, "rank {} of {}", rank, size);
  if (like != "thread" && like != "mpi") {
    throw UsageError("meta communicator like \"{}\", wanted thread or mpi", like);
  }
  return std::make_unique<MetaCommunicator>(rank, size, like, like == "mpi");
}

}  // namespace shardrun
