// Ranks as MPI processes: standard MPI-3, the main thread alone calls MPI, every wait polls. Called
// by runs under mpirun or srun.
//
// [Note: what MPI is trusted with] Moving bytes and adding integers. Canonical sums are folded
// here; a 16-bit sum never goes through MPI; fp32 only in reduce_scatter, whose order is MPI's own.
#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "comm/chunks.h"
#include "comm/communicator.h"

namespace shardrun {

namespace {

// MPI counts are ints, and implementations add some of them up. One piece of a message, in bytes.
constexpr size_t kMessageBytes = size_t{1} << 30;
constexpr int kExchangeTag = 1;
constexpr int kShiftTag = 2;

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommError("mpi: {}: {}", what, text);
}

// The requests of one call, kept between calls so that a step allocates nothing. Unwinding with
// some still open lets go of them: the job ends by MPI_Abort.
class Requests {
 public:
  void clear() { requests_.clear(); }
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }
  size_t size() const { return requests_.size(); }

  void wait_all(const char* what) { wait(0, requests_.size(), what); }
  void wait(size_t begin, size_t count, const char* what) {
    SHARDRUN_CHECK(count <= INT_MAX, "{} requests at once", count);
    for (int64_t tries = 0;; ++tries) {
      int done = 0;
      check(MPI_Testall(static_cast<int>(count), requests_.data() + begin, &done,
                        MPI_STATUSES_IGNORE),
            what);
      if (done) return;
      back_off(tries);
    }
  }

 private:
  std::vector<MPI_Request> requests_;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, bool owned, int rank, int size)
      : Communicator(rank, size), comm_(comm), owned_(owned) {}

  static std::unique_ptr<MpiCommunicator> make(MPI_Comm comm, bool owned) {
    int rank = 0, size = 0;
    check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return std::make_unique<MpiCommunicator>(comm, owned, rank, size);
  }

  ~MpiCommunicator() override {
    // MPI_Comm_free is collective: a rank that unwinds must not wait in it for the others.
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (owned_ && !finalized && message_.empty() && std::uncaught_exceptions() == 0) {
      MPI_Comm_free(&comm_);
    }
  }

  const char* transport() const override { return "mpi"; }

  void abort(const std::string& message) noexcept override {
    if (message_.empty()) message_ = message.empty() ? "aborted" : message;
  }
  void require_alive() const override {
    if (!message_.empty()) throw CommError("{}", message_);
  }

 private:
  void begin() {
    require_alive();
    requests_.clear();
    sends_.clear();
  }

  void do_all_gather_bytes(std::byte* full, const std::byte* shard, size_t shard_bytes) override {
    begin();
    if (shard_bytes == 0) return;
    std::byte* own = full + rank() * shard_bytes;
    if (own != shard) std::memcpy(own, shard, shard_bytes);
    if (shard_bytes * size() <= kMessageBytes) {
      check(MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, full, static_cast<int>(shard_bytes),
                           MPI_BYTE, comm_, requests_.add()),
            "all_gather");
    } else {
      for (int r = 0; r < size(); ++r) start_broadcast(full + r * shard_bytes, shard_bytes, r);
    }
    requests_.wait_all("all_gather");
  }

  // All receives are posted before any send, so that slices land where they stay; then they are
  // taken in order of source while later ones still travel.
  void do_exchange_bytes(const std::byte* mine, size_t slice_bytes, int senders, Memory& memory,
                         FunctionRef<void(int source, const std::byte* slice)> take) override {
    begin();
    const Staging layout(size(), slice_bytes);
    const Buffer staging = layout.allocate(memory);
    const auto slot_of = [&](int source) {
      return static_cast<std::byte*>(staging.data()) +
             layout.slot_of(source, rank()) * layout.slot_bytes;
    };
    for (int r = 0; r < senders; ++r) {
      if (r == rank()) continue;
      for_each_chunk(slice_bytes, kMessageBytes, [&](size_t offset, size_t bytes) {
        check(MPI_Irecv(slot_of(r) + offset, static_cast<int>(bytes), MPI_BYTE, r, kExchangeTag,
                        comm_, requests_.add()),
              "exchange");
      });
    }
    // Each rank starts with its right-hand neighbour, lest all flood rank 0 first.
    for (int k = 1; k < size() && rank() < senders; ++k) {
      const int to = (rank() + k) % size();
      for_each_chunk(slice_bytes, kMessageBytes, [&](size_t offset, size_t bytes) {
        check(MPI_Isend(mine + to * slice_bytes + offset, static_cast<int>(bytes), MPI_BYTE, to,
                        kExchangeTag, comm_, sends_.add()),
              "exchange");
      });
    }
    const size_t pieces = (slice_bytes + kMessageBytes - 1) / kMessageBytes;
    size_t next = 0;
    for (int r = 0; r < senders; ++r) {
      if (r == rank()) {
        take(r, slice_bytes == 0 ? nullptr : mine + r * slice_bytes);
        continue;
      }
      requests_.wait(next, pieces, "exchange");
      next += pieces;
      take(r, slice_bytes == 0 ? nullptr : slot_of(r));
    }
    sends_.wait_all("exchange");
  }

  void do_reduce_scatter(float* shard, const void* data, Dtype, int64_t count, Memory&,
                         Stream&) override {
    const float* full = static_cast<const float*>(data);
    begin();
    if (count == 0) return;
    if (static_cast<size_t>(count) * size() * sizeof(float) <= kMessageBytes) {
      check(MPI_Ireduce_scatter_block(full, shard, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                                      comm_, requests_.add()),
            "reduce_scatter");
    } else {
      for (int r = 0; r < size(); ++r) {
        for_each_chunk(count, kMessageBytes / sizeof(float), [&](size_t offset, size_t elements) {
          check(MPI_Ireduce(full + r * count + offset, shard + offset, static_cast<int>(elements),
                            MPI_FLOAT, MPI_SUM, r, comm_, requests_.add()),
                "reduce_scatter");
        });
      }
    }
    requests_.wait_all("reduce_scatter");
  }

  // Sums as unsigned: they wrap, which for signed numbers MPI leaves open.
  void do_all_reduce(std::span<int64_t> values, bool max) override {
    begin();
    for_each_chunk(values.size(), kMessageBytes / sizeof(int64_t),
                   [&](size_t offset, size_t count) {
                     check(MPI_Iallreduce(MPI_IN_PLACE, values.data() + offset,
                                          static_cast<int>(count), max ? MPI_INT64_T : MPI_UINT64_T,
                                          max ? MPI_MAX : MPI_SUM, comm_, requests_.add()),
                           "all_reduce");
                   });
    requests_.wait_all("all_reduce");
  }

  void do_broadcast_bytes(std::byte* bytes, size_t count, int root) override {
    begin();
    start_broadcast(bytes, count, root);
    requests_.wait_all("broadcast");
  }

  void start_broadcast(std::byte* bytes, size_t count, int root) {
    for_each_chunk(count, kMessageBytes, [&](size_t offset, size_t piece) {
      check(MPI_Ibcast(bytes + offset, static_cast<int>(piece), MPI_BYTE, root, comm_,
                       requests_.add()),
            "broadcast");
    });
  }

  void do_shift_bytes(std::byte* from, const std::byte* mine, size_t bytes, int distance) override {
    begin();
    const int to = (rank() + distance) % size(), source = (rank() + size() - distance) % size();
    for_each_chunk(bytes, kMessageBytes, [&](size_t offset, size_t piece) {
      check(MPI_Irecv(from + offset, static_cast<int>(piece), MPI_BYTE, source, kShiftTag, comm_,
                      requests_.add()),
            "shift");
      check(MPI_Isend(mine + offset, static_cast<int>(piece), MPI_BYTE, to, kShiftTag, comm_,
                      requests_.add()),
            "shift");
    });
    requests_.wait_all("shift");
  }

  void do_barrier() override {
    begin();
    check(MPI_Ibarrier(comm_, requests_.add()), "barrier");
    requests_.wait_all("barrier");
  }

  std::unique_ptr<Communicator> do_split(int color) override {
    do_barrier();  // MPI_Comm_split has no form that polls: wait for the others first
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(comm_, color, rank(), &part), "split");
    return make(part, true);
  }

  MPI_Comm comm_;
  bool owned_;
  std::string message_;  // of abort; empty before
  Requests requests_;
  Requests sends_;
};

class MpiSessionOfProcess : public MpiSession {
 public:
  MpiSessionOfProcess(int* argc, char*** argv) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized) throw CommError("mpi: a session was started before in this process");
    int provided = MPI_THREAD_SINGLE;
    check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_FUNNELED) {
      throw CommError("mpi: thread level {}, wanted MPI_THREAD_FUNNELED ({})", provided,
                      MPI_THREAD_FUNNELED);
    }
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
    MPI_Comm node = MPI_COMM_NULL;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node),
          "MPI_Comm_split_type");
    check(MPI_Comm_rank(node, &local_rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(node, &local_size_), "MPI_Comm_size");
    check(MPI_Comm_free(&node), "MPI_Comm_free");
  }

  ~MpiSessionOfProcess() override {
    MPI_Comm_free(&world_);
    MPI_Finalize();
  }

  std::unique_ptr<Communicator> world() override { return MpiCommunicator::make(world_, false); }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  std::string library_version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    return std::string(text, length);
  }

  [[noreturn]] void abort(int exit_code) override {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);  // MPI_Abort is not declared to stay away
  }

 private:
  MPI_Comm world_ = MPI_COMM_NULL;
  int local_rank_ = 0;
  int local_size_ = 1;
};

}  // namespace

std::unique_ptr<MpiSession> MpiSession::start(int* argc, char*** argv) {
  return std::make_unique<MpiSessionOfProcess>(argc, argv);
}

}  // namespace shardrun
