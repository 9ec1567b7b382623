// Tensors between ranks. One class with several transports; public functions check their arguments
// once and keep the order of a sum, private do_ functions only move bytes. Every rank calls the
// same functions in the same order with the same counts. Not thread-safe: one thread per rank
// calls.
//
// A call on host tensors has finished when it returns; on a GPU's stream its results are ready for
// later work on the stream, and the host may not wait for them but by synchronize(). Errors:
// CommError.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "kernels/reduce.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/stream.h"
#include "runtime/tensor.h"

namespace shardrun {

// The canonical sum of one slice. [Note: canonical sum] Leaves are numbered through the step.
// Aligned blocks of `sum_block` leaves are folded left to right in fp32, block sums are folded left
// to right. The first leaf of a block, and the first block, are assigned and not added to zero.
// This order knows nothing of ranks, so the bits are the same for every world size.
struct SliceSum {
  Tensor total;  // fp32 [n]
  Tensor block;  // fp32 [n]; absent when sum_block is 1
};

// Which leaves a call brings: rank r holds leaf first + r when r < count, else none (it still
// calls).
struct LeafWindow {
  int64_t first = 0;
  int64_t count = 0;
  int64_t total = 0;      // leaves in the whole step: the last block ends there
  int64_t sum_block = 1;  // B
};

// Payload of this rank, the same on every transport: an exchange and a gather send each slice
// straight to its reader, a broadcast leaves the root once for each reader, a reduction passes
// once.
struct Traffic {
  double sent_bytes = 0, received_bytes = 0;
  int64_t calls = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const char* transport() const = 0;  // "thread", "mpi", "meta:mpi", ...
  int rank() const { return rank_; }
  int size() const { return size_; }

  // full [W n] = shards [n] of ranks 0..W-1. shard may be full's own slice of this rank.
  void all_gather(Tensor full, ConstTensor shard, Stream& stream);

  // Canonical sum, first hop: this rank's `leaf` [W n] in the wire dtype (fp32, bf16, fp16; shape
  // and dtype count on every rank, the bytes only where the window gives this rank a leaf), slice j
  // goes to rank j; here all leaves of the window are folded into `sum` in order of leaf, also on
  // an idle stream. After the last leaf of the step `sum.total` is complete. `found` (int64 [1]):
  // the place, of this rank's slice, where a leaf or the sum with it first was not finite, as
  // kernels::fold has it; element i of the slice is element rank n + i of the leaf.
  void exchange_sum(SliceSum sum, Tensor found, ConstTensor leaf, const LeafWindow& window,
                    Memory& memory, Stream& stream);

  // The same over whole blocks, once a step: rank r holds the finished fp32 sum of block r (when
  // r < blocks). total [n] = block sums folded in order. The leaf of `found` is the block's number.
  void exchange_blocks(Tensor total, Tensor found, ConstTensor block, int64_t blocks,
                       Memory& memory, Stream& stream);

  // The transport's own sum in its own order: outside the promise of equal bits. shard fp32 [n] = sum
  // over ranks of their full [W n] (fp32, bf16, fp16). [Note: native sums] Only `nccl` adds in 16 bits,
  // rounding each time; others widen first, since no MPI is trusted with 16-bit sums. fp16 is first
  // divided by the smallest power of two that is not below W, so that no sum of finite numbers
  // overflows, and the sum is multiplied in fp32: exact but for what falls below fp16's smallest.
  // Within the sum of W |x| of each element times W 2^-23 (fp32), 2^-8 (bf16), 2^-11 (fp16, plus W^2
  // 2^-24).
  void reduce_scatter(Tensor shard, ConstTensor full, Memory& memory, Stream& stream);
  // In place of exchange_sum and exchange_blocks: the native sum of the window's leaves, added to
  // total [n], or assigned where window.first is 0. A rank without a leaf brings zeros: its `leaf` is
  // overwritten. `found` names the window's first leaf, whoever's it was.
  void native_sum(Tensor total, Tensor found, Tensor leaf, const LeafWindow& window, Memory& memory,
                  Stream& stream);

  // In place, element by element, 64-bit integers (wrapping): exact in any order.
  void all_reduce_sum(std::span<int64_t> values);
  void all_reduce_max(std::span<int64_t> values);

  void broadcast(std::span<std::byte> bytes, int root);
  void broadcast(Tensor tensor, int root, Stream& stream);

  // all [W n] = every rank's `mine` [n], in rank order, host bytes: decisions, checks, names.
  void all_gather_bytes(std::span<std::byte> all, std::span<const std::byte> mine);
  // Each rank r < senders sends slice j of `mine` (host, W slices of slice_bytes; else empty) to rank
  // j; here take(source, slice) is called for each source in order, while the slice lasts.
  void exchange_bytes(std::span<const std::byte> mine, size_t slice_bytes, int senders,
                      Memory& memory, FunctionRef<void(int source, const std::byte* slice)> take);
  // Host bytes around the ring: `mine` goes to rank + distance, `from` comes from rank - distance,
  // as many bytes; 0 < distance <= size.
  void shift_bytes(std::span<std::byte> from, std::span<const std::byte> mine, int distance);
  void barrier();

  // The host waits until all that `stream` was given is done, collectives too: unlike
  // Stream::synchronize() it ends, by CommError, when a partner fails, aborts or stays away.
  void synchronize(Stream& stream);
  // CommError once this communicator, or one that it was split from or into, was aborted.
  virtual void require_alive() const = 0;

  // Ranks with one colour (>= 0) form a communicator, ordered by rank here. All ranks call.
  std::unique_ptr<Communicator> split(int color);

  // Ends every rank that waits in this communicator, now or later, with CommError(message); also in
  // those it was split from or into. Called when this rank unwinds. On `mpi` the caller aborts the
  // job afterwards.
  virtual void abort(const std::string& message) noexcept = 0;

  // Tensors will often come from these bytes: where the transport can, it prepares for them. The
  // memory must outlive the communicator.
  virtual void register_memory(void* /*data*/, size_t /*bytes*/) {}

  const Traffic& traffic() const { return traffic_; }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  Traffic traffic_;

 private:
  // Byte movers. Pointers may be null where bytes is 0 or the stream kind is meta. Those with a
  // stream carry tensors: a transport of host tensors inherits them, its bytes are all there is.
  virtual void do_all_gather(std::byte* full, const std::byte* shard, size_t shard_bytes,
                             Stream& stream);
  // Calls take(source, bytes of source's slice for this rank) once for each rank in [0, senders),
  // in order. `mine` is null when this rank sends nothing.
  virtual void do_exchange(const std::byte* mine, size_t slice_bytes, int senders, Memory& memory,
                           FunctionRef<void(int source, const std::byte* slice)> take,
                           Stream& stream);
  // count: elements of the shard. `wire` is what reduces() takes.
  virtual void do_reduce_scatter(float* shard, const void* full, Dtype wire, int64_t count,
                                 Memory& memory, Stream& stream) = 0;
  virtual bool reduces(Dtype wire) const { return wire == Dtype::fp32; }
  virtual void do_broadcast(std::byte* bytes, size_t count, int root, Stream& stream);
  virtual void do_synchronize(Stream& stream) {
    require_alive();
    stream.synchronize();
  }

  virtual void do_all_gather_bytes(std::byte* all, const std::byte* mine, size_t bytes) = 0;
  virtual void do_exchange_bytes(const std::byte* mine, size_t slice_bytes, int senders,
                                 Memory& memory,
                                 FunctionRef<void(int source, const std::byte* slice)> take) = 0;
  virtual void do_all_reduce(std::span<int64_t> values, bool max) = 0;
  virtual void do_broadcast_bytes(std::byte* bytes, size_t count, int root) = 0;
  // Unless a transport knows better: everyone's in small blocks, of which one is kept.
  virtual void do_shift_bytes(std::byte* from, const std::byte* mine, size_t bytes, int distance);
  virtual void do_barrier() = 0;
  virtual std::unique_ptr<Communicator> do_split(int color) = 0;
  virtual bool serves(DeviceKind kind) const { return kind == DeviceKind::cpu; }
  bool moves_data() const { return !serves(DeviceKind::meta); }

  void check_stream(const Stream& stream) const;
  void check_data(const ConstTensor& tensor, const char* name) const;
  void count_call(double sent, double received);
  void count_broadcast(size_t bytes, int root);

  int rank_;
  int size_;
};

// N ranks as threads of this process. make() once, then each thread takes its own rank's
// communicator; the group outlives them. Waiting ranks poll with back-off (ranks may exceed cores)
// and end with CommError when one aborts or `deadline_seconds` (0: none) pass without a partner.
class ThreadGroup {
 public:
  static std::shared_ptr<ThreadGroup> make(int size, double deadline_seconds = 0);
  virtual ~ThreadGroup() = default;
  virtual std::unique_ptr<Communicator> communicator(int rank) = 0;
};

// Runs body(communicator) on `size` threads and joins them. The first exception of a rank aborts
// the others and is rethrown here (the cause, not the CommErrors that followed from it).
void run_thread_ranks(int size, FunctionRef<void(Communicator&)> body, double deadline_seconds = 0);

// MPI. The constructor of the session calls MPI_Init_thread(FUNNELED) and its destructor
// MPI_Finalize; one per process. Without MPI in the build a file that throws stands in
// (no_mpi.cpp).
class MpiSession {
 public:
  static std::unique_ptr<MpiSession> start(int* argc, char*** argv);
  virtual ~MpiSession() = default;
  virtual std::unique_ptr<Communicator> world() = 0;
  virtual int local_rank() const = 0;  // among the ranks of this node
  virtual int local_size() const = 0;
  virtual std::string library_version() const = 0;
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

// Device tensors over a transport of host tensors: from the GPU into pinned memory, through `host`,
// and back, in pieces, so that pinned memory has a fixed size. Sums are folded on the GPU. Host
// tensors and host values go to `host` as they are. So several ranks train on one GPU, and ranks
// without NCCL on several. The host waits inside a call for what it sends, never for what it received.
// `host` and `device` outlive the communicator.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, Device& device);
// Host memory of one rank's staged communicator, made at its construction: two buffers to send from,
// two to receive into (pinned), and what `host` stages in itself.
constexpr size_t kStagedBufferBytes = size_t{4} << 20;
size_t staged_host_bytes(int size);

// NCCL, for ranks that have a GPU each. Host values and the unique id go over `host`, tensors of the
// GPU over NCCL, queued on the stream of the call. `host` and `device` outlive the communicator, and it
// goes before the memory that its calls named. A rank that does not come, in making it or later in
// synchronize(), ends the wait by CommError after `deadline_seconds` (0: making it has 300, calls have
// no deadline). Throws DeviceError when ranks share a GPU. Where NCCL was not built a file that throws
// stands in (no_nccl.cpp).
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, Device& device,
                                                     double deadline_seconds);
std::string nccl_unavailable();      // "" when it is there, else why not
std::string nccl_library_version();  // "2.28.9"; empty when it is not there

// The lowest two ranks that sit on one GPU. Collective.
std::optional<std::pair<int, int>> ranks_on_one_gpu(Communicator& host, const Device& device);

// Moves nothing and counts what `like` ("thread", "mpi", "staged", "nccl") would move, with its
// staging allocations: for plans of any world size on one machine. Tensors are on `meta`; host values
// (reductions, bytes) come out as if every rank had brought what this one did. split() throws: nobody
// knows the others' colours.
std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& like);

}  // namespace shardrun
