// Tensors between GPUs by NCCL. It moves bytes; sums are folded by kernels in order of leaf. What is
// decided on the host (values, names, the unique id, barriers) goes over the host communicator. Called
// by ranks that have a GPU each.
//
// [Note: nothing blocks] The communicator is made non-blocking: a call may answer "in progress", and the
// host asks again, backing off, until it is done, the deadline has passed or another rank has aborted.
// What was queued is waited for in the same way (synchronize), because a collective whose partner is
// gone never ends by itself. Whatever ends a wait aborts NCCL before it throws: memory can be freed
// only when no kernel is stuck in it.
#include <nccl.h>

#include <cstring>
#include <exception>
#include <vector>

#include "comm/chunks.h"
#include "comm/communicator.h"
#include "kernels/elementwise.h"

namespace shardrun {

namespace {

constexpr double kMakingSeconds = 300;

class Deadline {
 public:
  explicit Deadline(double seconds) : seconds_(seconds), start_(Clock::now()) {}
  bool over() const {
    return seconds_ > 0 && std::chrono::duration<double>(Clock::now() - start_).count() > seconds_;
  }
  double seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_;
  Clock::time_point start_;
};

ncclDataType_t type_of(Dtype dtype) {
  return dtype == Dtype::fp32 ? ncclFloat32 : dtype == Dtype::bf16 ? ncclBfloat16 : ncclFloat16;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(Communicator& host, std::unique_ptr<Communicator> owned, Device& device,
                   double deadline_seconds)
      : Communicator(host.rank(), host.size()),
        owned_(std::move(owned)),
        host_(host),
        device_(device),
        deadline_seconds_(deadline_seconds),
        unwinding_(std::uncaught_exceptions()) {
    device_.make_current();
    // Rank 0 may fail alone: then the others hear of it in place of an id.
    ncclUniqueId id{};
    struct {
      ncclUniqueId id;
      int result;
    } first{id, ncclSuccess};
    if (rank() == 0) first.result = ncclGetUniqueId(&first.id);
    host_.broadcast(std::as_writable_bytes(std::span(&first, 1)), 0);
    if (first.result != ncclSuccess) {
      throw CommError("nccl: rank 0 of {}: ncclGetUniqueId: {}", size(),
                      ncclGetErrorString(static_cast<ncclResult_t>(first.result)));
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const Deadline deadline(deadline_seconds > 0 ? deadline_seconds : kMakingSeconds);
    try {
      settle(ncclCommInitRankConfig(&comm_, size(), first.id, rank(), &config),
             "ncclCommInitRankConfig", deadline);
    } catch (...) {
      abort_nccl();
      throw;
    }
  }

  ~NcclCommunicator() override {
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() > unwinding_) {
      abort_nccl();
      return;
    }
    try {
      const Deadline deadline(deadline_seconds_ > 0 ? deadline_seconds_ : kMakingSeconds);
      if (has_scaled_sum_) ncclRedOpDestroy(scaled_sum_, comm_);
      for (void* handle : registered_) ncclCommDeregister(comm_, handle);
      settle(ncclCommFinalize(comm_), "ncclCommFinalize", deadline);
      ncclCommDestroy(comm_);
      comm_ = nullptr;
    } catch (const std::exception&) {
      abort_nccl();  // the partners' trouble, which they report
    }
  }

  const char* transport() const override { return "nccl"; }

  void abort(const std::string& message) noexcept override {
    host_.abort(message);
    abort_nccl();
  }
  void require_alive() const override { host_.require_alive(); }

  void register_memory(void* data, size_t bytes) override {
    if (bytes == 0) return;
    void* handle = nullptr;
    require_nccl();
    try {
      settle(ncclCommRegister(comm_, data, bytes, &handle), "ncclCommRegister");
    } catch (const DeviceError&) {
      return;  // an older library does without
    }
    if (handle != nullptr) registered_.push_back(handle);
  }

 private:
  bool serves(DeviceKind kind) const override { return kind == DeviceKind::cuda; }

  void require_nccl() {
    require_host();
    if (comm_ == nullptr) throw CommError("nccl: rank {} of {} was aborted", rank(), size());
  }

  void abort_nccl() noexcept {
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  // The others hear the cause before NCCL tells them that somebody is gone; where that is what this
  // rank was told, it throws the cause.
  [[noreturn]] void fail(const char* call, const std::string& what) {
    require_host();
    const CommError error("nccl: rank {} of {}: {}: {}", rank(), size(), call, what);
    abort(error.what());
    throw error;
  }

  static std::string text(ncclResult_t result, ncclComm_t comm) {
    const char* last = ncclGetLastError(comm);
    return last != nullptr && *last != '\0'
               ? fmt::format("{} ({})", ncclGetErrorString(result), last)
               : std::string(ncclGetErrorString(result));
  }

  // Until `result`, of `call`, is no longer "in progress".
  void settle(ncclResult_t result, const char* call) {
    settle(result, call, Deadline(deadline_seconds_));
  }
  void settle(ncclResult_t result, const char* call, const Deadline& deadline) {
    for (int64_t tries = 0; result == ncclInProgress; ++tries) {
      look(call, deadline);
      back_off(tries);
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclSuccess) fail(call, text(result, comm_));
  }

  void require_host() {
    try {
      host_.require_alive();
    } catch (...) {
      abort_nccl();
      throw;
    }
  }

  // Throws when a wait is to end without what it waits for.
  void look(const char* call, const Deadline& deadline) {
    require_host();
    if (deadline.over()) {
      fail(call, fmt::format("waited {} s for the other ranks", deadline.seconds()));
    }
  }

  void do_synchronize(Stream& stream) override {
    const Deadline deadline(deadline_seconds_);
    require_nccl();
    reached_.record(stream);
    for (int64_t tries = 0; !reached_.done(); ++tries) {
      require_nccl();
      look(last_call_, deadline);
      ncclResult_t result = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
      if (asked != ncclSuccess) result = asked;
      if (result != ncclSuccess && result != ncclInProgress) fail(last_call_, text(result, comm_));
      back_off(tries);
    }
  }

  // Every collective: the device of this thread, and no call while another is in progress.
  cudaStream_t begin(const char* call, Stream& stream) {
    require_nccl();
    last_call_ = call;
    return static_cast<cudaStream_t>(stream.handle());
  }

  void do_all_gather(std::byte* full, const std::byte* shard, size_t shard_bytes,
                     Stream& stream) override {
    const cudaStream_t queue = begin("all_gather", stream);
    if (shard_bytes == 0) return;
    settle(ncclAllGather(shard, full, shard_bytes, ncclInt8, comm_, queue), "all_gather");
  }

  // One group: NCCL starts all of it at once, so no order among ranks can block.
  void do_exchange(const std::byte* mine, size_t slice_bytes, int senders, Memory& memory,
                   FunctionRef<void(int source, const std::byte* slice)> take,
                   Stream& stream) override {
    const cudaStream_t queue = begin("exchange", stream);
    const Staging layout(size(), slice_bytes);
    const Buffer staging = layout.allocate(memory);
    const auto slot_of = [&](int source) {
      return static_cast<std::byte*>(staging.data()) +
             layout.slot_of(source, rank()) * layout.slot_bytes;
    };
    const bool moves = slice_bytes > 0 && size() > 1 && senders > 0;
    if (moves) {
      settle(ncclGroupStart(), "exchange");
      for (int r = 0; r < senders; ++r) {
        if (r == rank()) continue;
        in_group(ncclRecv(slot_of(r), slice_bytes, ncclInt8, r, comm_, queue));
      }
      for (int k = 1; k < size() && mine != nullptr; ++k) {
        const int to = (rank() + k) % size();
        in_group(ncclSend(mine + to * slice_bytes, slice_bytes, ncclInt8, to, comm_, queue));
      }
      settle(ncclGroupEnd(), "exchange");
    }
    for (int r = 0; r < senders; ++r) {
      take(r, slice_bytes == 0 ? nullptr : r == rank() ? mine + r * slice_bytes : slot_of(r));
    }
  }

  // A call refused inside a group leaves the group open: close it before the throw.
  void in_group(ncclResult_t result) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const std::string what = text(result, comm_);
    ncclGroupEnd();
    fail(last_call_, what);
  }

  bool reduces(Dtype) const override { return true; }

  // See [Note: native sums].
  void do_reduce_scatter(float* shard, const void* full, Dtype wire, int64_t count, Memory& memory,
                         Stream& stream) override {
    const cudaStream_t queue = begin("reduce_scatter", stream);
    const Tensor sum(shard, Dtype::fp32, Shape{count});
    if (count == 0) return;
    if (wire == Dtype::fp32) {
      settle(ncclReduceScatter(full, shard, count, ncclFloat32, ncclSum, comm_, queue),
             "reduce_scatter");
      return;
    }
    const OwnedTensor narrow = allocate_narrow_sum(memory, wire, count);
    const ncclRedOp_t op = wire == Dtype::fp16 ? scaled_sum() : ncclSum;
    settle(ncclReduceScatter(full, narrow.tensor.data(), count, type_of(wire), op, comm_, queue),
           "reduce_scatter");
    kernels::cast(sum, narrow.tensor, stream);
    for (int k = 0; k < halvings() && wire == Dtype::fp16; ++k) kernels::add(sum, sum, sum, stream);
  }

  // fp16 elements are multiplied by 2^-halvings before they are added.
  int halvings() const {
    int k = 0;
    while ((1 << k) < size()) ++k;
    return k;
  }
  ncclRedOp_t scaled_sum() {
    if (!has_scaled_sum_) {
      uint16_t factor = static_cast<uint16_t>((15 - halvings()) << 10);
      settle(ncclRedOpCreatePreMulSum(&scaled_sum_, &factor, ncclFloat16, ncclScalarHostImmediate,
                                      comm_),
             "ncclRedOpCreatePreMulSum");
      has_scaled_sum_ = true;
    }
    return scaled_sum_;
  }

  void do_broadcast(std::byte* bytes, size_t count, int root, Stream& stream) override {
    const cudaStream_t queue = begin("broadcast", stream);
    if (count == 0) return;
    settle(ncclBroadcast(bytes, bytes, count, ncclInt8, root, comm_, queue), "broadcast");
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

  // A fresh id over the host's part: the part's ranks need nobody else, and outlive this.
  std::unique_ptr<Communicator> do_split(int color) override {
    std::unique_ptr<Communicator> part = host_.split(color);
    Communicator& host = *part;
    return std::make_unique<NcclCommunicator>(host, std::move(part), device_, deadline_seconds_);
  }

  std::unique_ptr<Communicator> owned_;  // of a part that was split off: what host_ names
  Communicator& host_;
  Device& device_;
  double deadline_seconds_;
  int unwinding_;
  ncclComm_t comm_ = nullptr;
  std::vector<void*> registered_;
  ncclRedOp_t scaled_sum_ = ncclSum;
  bool has_scaled_sum_ = false;
  Event reached_;
  const char* last_call_ = "synchronize";
};

}  // namespace

std::string nccl_unavailable() {
  int version = 0;
  try {
    const ncclResult_t result = ncclGetVersion(&version);
    return result == ncclSuccess ? "" : ncclGetErrorString(result);
  } catch (const DeviceError& error) {
    return error.what();
  }
}

std::string nccl_library_version() {
  int version = 0;
  if (!nccl_unavailable().empty() || ncclGetVersion(&version) != ncclSuccess) return "";
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, Device& device,
                                                     double deadline_seconds) {
  const std::string unavailable = nccl_unavailable();
  if (!unavailable.empty()) throw CommError("transport nccl: {}", unavailable);
  if (const auto shared = ranks_on_one_gpu(host, device)) {
    throw DeviceError(
        "transport nccl: ranks {} and {} sit on one GPU, which NCCL does not serve; use --comm "
        "staged, or at most one rank for each GPU",
        shared->first, shared->second);
  }
  return std::make_unique<NcclCommunicator>(host, nullptr, device, deadline_seconds);
}

}  // namespace shardrun
