// The symbols of NCCL that the backend calls, over memory that ranks share. See nccl.h.
//
// [Note: one channel per pair] All that rank a sends to rank b, of whatever call, goes through one
// channel, in order, each message with the name of its call. A rank's group runs when it is first on
// its stream and is the communicator's next: it posts all its messages, waits until all of its
// partners' are there, compares them with what it expects, and takes them. So order and arguments are
// checked where they matter, between each two ranks, and a late buffer is read late.
#include "tests/virtual_cuda/nccl.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/math/convert.h"
#include "tests/virtual_cuda/runtime.h"

namespace shardrun::virtual_cuda {

namespace {

enum class Op : int { all_gather, reduce_scatter, broadcast, send, receive };

const char* name_of(Op op) {
  constexpr const char* kNames[] = {"ncclAllGather", "ncclReduceScatter", "ncclBroadcast",
                                    "ncclSend", "ncclRecv"};
  return kNames[static_cast<int>(op)];
}

size_t size_of(ncclDataType_t type) {
  return type == ncclInt8 ? 1 : type == ncclFloat32 ? 4 : 2;
}

// ---- shared between ranks. Zero is the state of fresh memory.

constexpr int kMostRanks = 64;
constexpr size_t kChannelBytes = size_t{64} << 20;  // never touched, never there
constexpr uint64_t kMessages = 256;                 // under way in one channel

struct Message {
  int op, type, reduction, root;
  uint64_t count, number;  // number: how many collectives came before
  size_t offset, bytes;
};

struct Channel {
  std::atomic<uint64_t> posted, taken;
  size_t end;  // the sender's: behind its last message
  Message messages[kMessages];
  std::byte data[kChannelBytes];
};

struct Shared {
  struct Rank {
    std::atomic<int> joined;  // 1 + its number of ranks
    std::atomic<int> process, device;
  };
  std::atomic<int> aborted;  // 1 + the rank that did
  Rank ranks[kMostRanks];
};

size_t header_bytes() {
  return (sizeof(Shared) + 4095) / 4096 * 4096;
}

struct Request {
  Op op;
  const std::byte* send;
  std::byte* receive;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int peer;  // or root
  size_t bytes() const { return count * size_of(type); }
};

struct Operator {
  ncclDataType_t type;
  float factor;
};

struct Fault {
  std::string function;
  int64_t n;
  ncclResult_t error;
  int rank;
  std::map<int, int64_t> seen;
};

std::mutex mutex;  // of the following
std::vector<Fault> faults;
LivingNccl alive;

}  // namespace

}  // namespace shardrun::virtual_cuda

// Shared by the handle and by what is queued: work that runs after an abort finds it.
struct ncclComm {
  using Shared = shardrun::virtual_cuda::Shared;
  using Channel = shardrun::virtual_cuda::Channel;

  ~ncclComm() {
    if (map != nullptr) munmap(map, bytes);
    if (file >= 0) close(file);
  }
  Channel& channel(int from, int to) const {
    std::byte* channels = static_cast<std::byte*>(map) + shardrun::virtual_cuda::header_bytes();
    return reinterpret_cast<Channel*>(channels)[from * size + to];
  }
  Shared& shared() const { return *static_cast<Shared*>(map); }

  std::shared_ptr<ncclComm> self;  // until it is given back
  int rank = 0, size = 0, device = 0;
  void* map = nullptr;
  size_t bytes = 0;
  int file = -1;  // of the rank that made the id
  std::string id;

  bool joined = false, finalized = false;
  bool in_progress = false;  // the last call has not been settled
  int64_t calls = 0;
  ncclResult_t error = ncclSuccess;
  std::atomic<bool> aborted = false;
  uint64_t issued = 0;                   // groups given
  std::atomic<uint64_t> done = 0;        // groups run
  std::vector<uint64_t> sent, received;  // messages of each partner, to count collectives by
  uint64_t collectives_posted = 0, collectives_taken = 0;
  std::map<void*, size_t> buffers;
  std::map<int, shardrun::virtual_cuda::Operator> operators;
};

namespace shardrun::virtual_cuda {

namespace {

thread_local std::string last_text;
thread_local int depth = 0;
struct Collected {
  ncclComm_t comm;
  cudaStream_t stream;
  Request request;
};
thread_local std::vector<Collected> collected;

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  last_text = text;
  return result;
}

// Of planned failures; success where there is none.
ncclResult_t planned(const char* function, int rank) {
  const std::lock_guard lock(mutex);
  ncclResult_t result = ncclSuccess;
  for (Fault& fault : faults) {
    if (fault.function != function || (fault.rank >= 0 && fault.rank != rank)) continue;
    if (++fault.seen[rank] == fault.n) result = fault.error;
  }
  if (result != ncclSuccess) last_text = "a planned failure";
  return result;
}

// Beginning of every call on a communicator that is in use.
ncclResult_t enter(const char* function, ncclComm_t comm) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "no communicator");
  const ncclResult_t plan = planned(function, comm->rank);
  if (plan != ncclSuccess) return comm->error = plan;
  if (comm->error != ncclSuccess) return comm->error;
  if (!comm->joined || comm->in_progress || comm->finalized) {
    return refuse(ncclInvalidUsage,
                  fmt::format("{} of rank {}: the communicator is {}", function, comm->rank,
                              comm->finalized ? "finalized" : "in progress with another call"));
  }
  return ncclSuccess;
}

ncclResult_t leave(ncclComm_t comm) {
  if (++comm->calls % 3 != 0) return ncclSuccess;
  comm->in_progress = true;
  return ncclInProgress;
}

// ---- running a group

std::string text_of(const Message& m) {
  return fmt::format("{}({} of type {}, op {}, root or peer {}), call {}",
                     name_of(static_cast<Op>(m.op)), m.count, m.type, m.reduction, m.root,
                     m.number);
}

class Group {
 public:
  Group(std::shared_ptr<ncclComm> comm, std::vector<Request> requests)
      : comm_(std::move(comm)), index_(comm_->issued++), requests_(std::move(requests)) {}

  // Posts what it can, and says whether all that it takes is there.
  bool ready() {
    if (comm_->aborted) return true;
    if (comm_->done != index_) return false;
    if (!planned_) plan();
    planned_ = true;
    while (posted_ < outgoing_.size() && post(outgoing_[posted_])) ++posted_;
    if (posted_ < outgoing_.size()) return false;
    std::vector<uint64_t> seen(static_cast<size_t>(comm_->size));
    for (const Incoming& in : incoming_) {
      const Channel& channel = comm_->channel(in.from, comm_->rank);
      if (channel.posted <= channel.taken + seen[static_cast<size_t>(in.from)]++) return false;
    }
    return true;
  }

  // Takes all; throws where a partner called something else.
  void run() {
    if (comm_->aborted) return;
    for (const Copy& copy : copies_) std::memmove(copy.to, copy.from, copy.bytes);
    for (const Incoming& in : incoming_) {
      Channel& channel = comm_->channel(in.from, comm_->rank);
      const Message& got = channel.messages[channel.taken % kMessages];
      Message wanted = in.wanted;
      if (got.op != wanted.op || got.type != wanted.type || got.reduction != wanted.reduction ||
          got.root != wanted.root || got.count != wanted.count || got.number != wanted.number) {
        throw std::runtime_error(
            fmt::format("ranks disagree: rank {} waits for {}, rank {} brings {}", comm_->rank,
                        text_of(wanted), in.from, text_of(got)));
      }
      if (in.adds) {
        add(in, channel.data + got.offset);
      } else if (got.bytes > 0) {
        std::memcpy(in.to, channel.data + got.offset, got.bytes);
      }
      ++channel.taken;
    }
    ++comm_->done;
    ran_ = true;
  }

  bool ran() const { return ran_; }

 private:
  struct Outgoing {
    int to;
    Message message;
    const std::byte* from;
  };
  struct Incoming {
    int from;
    Message wanted;
    std::byte* to;
    bool adds = false;
  };
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };

  void plan() {
    const int rank = comm_->rank, size = comm_->size;
    for (const Request& r : requests_) {
      const size_t bytes = r.bytes();
      Message m{static_cast<int>(r.op), r.type, r.reduction, r.peer, r.count, 0, 0, bytes};
      const bool collective = r.op != Op::send && r.op != Op::receive;
      if (collective) m.number = ++comm_->collectives_posted;
      switch (r.op) {
        case Op::all_gather:
          for (int k = 1; k < size; ++k) {
            const int peer = (rank + k) % size;
            outgoing_.push_back({peer, m, r.send});
            incoming_.push_back({peer, m, r.receive + static_cast<size_t>(peer) * bytes});
          }
          copies_.push_back({r.receive + static_cast<size_t>(rank) * bytes, r.send, bytes});
          break;
        case Op::reduce_scatter:
          // A ring's order: a rank's own slice comes last.
          for (int k = 1; k < size; ++k) {
            const int peer = (rank + k) % size;
            outgoing_.push_back({peer, m, r.send + static_cast<size_t>(peer) * bytes});
            incoming_.push_back({peer, m, r.receive, true});
          }
          own_ = r.send + static_cast<size_t>(rank) * bytes;
          if (size == 1) copies_.push_back({r.receive, own_, bytes});
          break;
        case Op::broadcast:
          for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            if (rank == r.peer) outgoing_.push_back({peer, m, r.send});
            if (peer == r.peer) incoming_.push_back({peer, m, r.receive});
          }
          if (rank == r.peer) copies_.push_back({r.receive, r.send, bytes});
          break;
        // A message names both ends the same: as a send to its reader.
        case Op::send:
          m.root = r.peer;
          outgoing_.push_back({r.peer, m, r.send});
          break;
        case Op::receive:
          m.op = static_cast<int>(Op::send);
          m.root = rank;
          incoming_.push_back({r.peer, m, r.receive});
          break;
      }
    }
  }

  bool post(const Outgoing& out) {
    Channel& channel = comm_->channel(comm_->rank, out.to);
    const uint64_t under_way = channel.posted - channel.taken;
    if (under_way == 0) channel.end = 0;
    if (under_way == kMessages || channel.end + out.message.bytes > kChannelBytes) return false;
    Message& message = channel.messages[channel.posted % kMessages];
    message = out.message;
    message.offset = channel.end;
    if (message.bytes > 0) std::memcpy(channel.data + channel.end, out.from, message.bytes);
    channel.end += message.bytes;
    ++channel.posted;
    return true;
  }

  // Elements of a reduction, each rounded to its type after every addition.
  void add(const Incoming& in, const std::byte* theirs) {
    const Message& m = in.wanted;
    const bool first = in.from == (comm_->rank + 1) % comm_->size;
    const bool last = (in.from + 1) % comm_->size == comm_->rank;
    float factor = 1;
    if (m.reduction != ncclSum) factor = comm_->operators.at(m.reduction).factor;
    const auto read = [&](const std::byte* data, uint64_t i) {
      if (m.type == ncclFloat32) {
        float x;
        std::memcpy(&x, data + 4 * i, 4);
        return x;
      }
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, 2);
      return m.type == ncclFloat16 ? math::widen(Fp16{bits}) : math::widen(Bf16{bits});
    };
    const auto write = [&](float x, uint64_t i) {
      if (m.type == ncclFloat32) {
        std::memcpy(in.to + 4 * i, &x, 4);
      } else if (m.type == ncclFloat16) {
        Fp16 half;
        math::narrow(x, half);
        std::memcpy(in.to + 2 * i, &half, 2);
      } else {
        Bf16 half;
        math::narrow(x, half);
        std::memcpy(in.to + 2 * i, &half, 2);
      }
    };
    const auto scaled = [&](const std::byte* data, uint64_t i) {
      float x = read(data, i) * factor;
      if (m.type == ncclFloat16) {
        Fp16 half;
        math::narrow(x, half);
        x = math::widen(half);
      }
      return x;
    };
    for (uint64_t i = 0; i < m.count; ++i) {
      write(first ? scaled(theirs, i) : read(in.to, i) + scaled(theirs, i), i);
      if (last) write(read(in.to, i) + scaled(own_, i), i);
    }
  }

  std::shared_ptr<ncclComm> comm_;
  uint64_t index_;
  std::vector<Request> requests_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<Copy> copies_;
  const std::byte* own_ = nullptr;
  size_t posted_ = 0;
  bool planned_ = false, ran_ = false;
};

std::string wrong_memory(const Request& r, int rank, int size) {
  const size_t n = static_cast<size_t>(size);
  size_t send = r.bytes(), receive = r.bytes();
  if (r.op == Op::all_gather) receive *= n;
  if (r.op == Op::reduce_scatter) send *= n;
  if (r.op == Op::receive || (r.op == Op::broadcast && rank != r.peer)) send = 0;
  if (r.op == Op::send) receive = 0;
  std::string wrong = send == 0 ? "" : not_reachable(r.send, send);
  if (wrong.empty() && receive > 0) wrong = not_reachable(r.receive, receive);
  return wrong;
}

// What a group, or a call outside of one, gives to a stream.
ncclResult_t submit_group(std::vector<Collected> all) {
  for (const Collected& one : all) {
    if (one.comm != all[0].comm || one.stream != all[0].stream) {
      return refuse(ncclInvalidUsage, "a group over several communicators or streams");
    }
  }
  ncclComm_t comm = all[0].comm;
  std::vector<Request> requests;
  size_t bytes = 0;
  for (const Collected& one : all) {
    requests.push_back(one.request);
    bytes += one.request.bytes();
  }
  const char* name = all.size() == 1 ? name_of(requests[0].op) : "ncclGroupEnd";
  const uint64_t before = comm->issued;
  auto group = std::make_shared<Group>(comm->self, std::move(requests));
  const cudaError_t error = submit(
      all[0].stream,
      {Kind::library, name, bytes, [group] { group->run(); }, [group] { return group->ready(); }});
  if (error != cudaSuccess) {
    comm->issued = before;
    comm->error = ncclUnhandledCudaError;
    return refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
  }
  // Dropped by a test: as if it had never been called.
  if (group.use_count() == 1 && !group->ran()) comm->issued = before;
  return leave(comm);
}

ncclResult_t call(ncclComm_t comm, cudaStream_t stream, const Request& request) {
  const ncclResult_t entered = enter(name_of(request.op), comm);
  if (entered != ncclSuccess) return entered;
  if (request.peer < 0 || request.peer >= comm->size) {
    return refuse(ncclInvalidArgument,
                  fmt::format("root or peer {} of {}", request.peer, comm->size));
  }
  if ((request.op == Op::send || request.op == Op::receive) && request.peer == comm->rank) {
    return refuse(ncclInvalidUsage, "a message to oneself");
  }
  if (request.reduction != ncclSum) {
    const auto at = comm->operators.find(request.reduction);
    if (at == comm->operators.end() || at->second.type != request.type) {
      return refuse(ncclInvalidArgument, "an operator of another communicator or type");
    }
  }
  if (request.bytes() > kChannelBytes) {
    return refuse(ncclInvalidArgument, fmt::format("{} bytes: the virtual library takes {}",
                                                   request.bytes(), kChannelBytes));
  }
  const std::string wrong = wrong_memory(request, comm->rank, comm->size);
  if (!wrong.empty())
    return refuse(ncclInvalidArgument, fmt::format("{}: {}", name_of(request.op), wrong));
  if (depth > 0) {
    collected.push_back({comm, stream, request});
    return ncclSuccess;
  }
  return submit_group({{comm, stream, request}});
}

// ---- joining

std::string duplicate(const ncclComm& comm) {
  const Shared& shared = comm.shared();
  for (int a = 0; a < comm.size; ++a) {
    if (shared.ranks[a].joined != 1 + comm.size) {
      return fmt::format("rank {} wants {} ranks, rank {} wants {}", a, shared.ranks[a].joined - 1,
                         comm.rank, comm.size);
    }
    for (int b = a + 1; b < comm.size; ++b) {
      if (shared.ranks[a].device == shared.ranks[b].device) {
        return fmt::format("Duplicate GPU detected : rank {} and rank {} both on device {}", a, b,
                           shared.ranks[a].device.load());
      }
    }
  }
  return "";
}

bool all_joined(const ncclComm& comm) {
  for (int r = 0; r < comm.size; ++r) {
    if (comm.shared().ranks[r].joined == 0) return false;
  }
  return true;
}

std::map<std::string, int> made_ids;  // file descriptors, until the communicator takes them

void give_back(ncclComm_t comm, bool aborted) {
  const std::lock_guard lock(mutex);
  --alive.communicators;
  alive.buffers -= static_cast<int64_t>(comm->buffers.size());
  alive.operators -= static_cast<int64_t>(comm->operators.size());
  if (aborted) ++alive.aborted;
  const std::shared_ptr<ncclComm> last = std::move(comm->self);
}

}  // namespace

void fail_nccl(const std::string& function, int64_t n, ncclResult_t error, int rank) {
  const std::lock_guard lock(mutex);
  faults.push_back({function, n, error, rank, {}});
}

LivingNccl living_nccl() {
  const std::lock_guard lock(mutex);
  return alive;
}

void reset_nccl() {
  const std::lock_guard lock(mutex);
  faults.clear();
  alive.aborted = 0;
}

}  // namespace shardrun::virtual_cuda

// ---- the library

using namespace shardrun::virtual_cuda;

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kNames[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return kNames[result];
}

const char* ncclGetLastError(ncclComm_t) {
  return last_text.c_str();
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

// Memory without a name on any disk: others open it by way of this process.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const ncclResult_t plan = planned("ncclGetUniqueId", 0);
  if (plan != ncclSuccess) return plan;
  const int file = memfd_create("virtual nccl", 0);
  if (file < 0) return refuse(ncclSystemError, std::strerror(errno));
  *id = {};
  const std::string path = fmt::format("/proc/{}/fd/{}", getpid(), file);
  std::memcpy(id->internal, path.data(), path.size());
  const std::lock_guard lock(mutex);
  made_ids[path] = file;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  *out = nullptr;
  const ncclResult_t plan = planned("ncclCommInitRankConfig", rank);
  if (plan != ncclSuccess) return plan;
  if (config == nullptr || config->magic != 0xcafebeef || config->blocking != 0) {
    return refuse(ncclInvalidArgument, "the virtual library wants a config that does not block");
  }
  if (ranks < 1 || ranks > kMostRanks || rank < 0 || rank >= ranks) {
    return refuse(ncclInvalidArgument, fmt::format("rank {} of {}", rank, ranks));
  }
  auto comm = std::make_shared<ncclComm>();
  comm->id = id.internal;
  comm->rank = rank;
  comm->size = ranks;
  cudaGetDevice(&comm->device);
  comm->bytes =
      header_bytes() + static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Channel);
  const int file = open(id.internal, O_RDWR | O_CLOEXEC);
  if (file < 0) return refuse(ncclRemoteError, "the process that made the id has gone");
  comm->file = file;
  if (ftruncate(file, static_cast<off_t>(comm->bytes)) != 0) {
    return refuse(ncclSystemError, std::strerror(errno));
  }
  void* map =
      mmap(nullptr, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (map == MAP_FAILED) return refuse(ncclSystemError, std::strerror(errno));
  comm->map = map;
  Shared::Rank& mine = comm->shared().ranks[rank];
  mine.process = getpid();
  mine.device = comm->device;
  int nobody = 0;
  if (!mine.joined.compare_exchange_strong(nobody, 1 + ranks)) {
    return refuse(ncclInvalidUsage, fmt::format("there are two ranks {}", rank));
  }
  comm->self = comm;
  *out = comm.get();
  const std::lock_guard lock(mutex);
  ++alive.communicators;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "no communicator");
  const ncclResult_t plan = planned("ncclCommGetAsyncError", comm->rank);
  if (plan != ncclSuccess) comm->error = plan;
  if (comm->error == ncclSuccess && comm->shared().aborted != 0) {
    last_text = fmt::format("rank {} aborted", comm->shared().aborted - 1);
    comm->error = ncclRemoteError;
  }
  *error = comm->error;
  if (*error != ncclSuccess) return ncclSuccess;
  if (!comm->joined) {
    *error = ncclInProgress;
    if (!all_joined(*comm)) return ncclSuccess;
    const std::string wrong = duplicate(*comm);
    if (!wrong.empty()) {
      last_text = wrong;
      *error = comm->error = ncclInvalidUsage;
      return ncclSuccess;
    }
    // The last one in, or one that looks after: the id has served.
    comm->joined = true;
    const std::lock_guard lock(mutex);
    if (const auto made = made_ids.find(comm->id); made != made_ids.end() && comm->rank == 0) {
      close(made->second);
      made_ids.erase(made);
    }
  }
  if (comm->finalized && comm->done != comm->issued) *error = ncclInProgress;
  comm->in_progress = false;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const ncclResult_t entered = enter("ncclCommFinalize", comm);
  if (entered != ncclSuccess) return entered;
  comm->finalized = true;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm->finalized || comm->done != comm->issued) {
    return refuse(ncclInvalidUsage, "destroyed before it was finalized");
  }
  give_back(comm, false);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  int nobody = 0;
  comm->shared().aborted.compare_exchange_strong(nobody, 1 + comm->rank);
  comm->aborted = true;
  give_back(comm, true);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t comm, void* data, size_t bytes, void** handle) {
  const ncclResult_t entered = enter("ncclCommRegister", comm);
  if (entered != ncclSuccess) return entered;
  const std::string wrong = not_reachable(data, bytes);
  if (!wrong.empty()) return refuse(ncclInvalidArgument, wrong);
  comm->buffers[data] = bytes;
  *handle = data;
  const std::lock_guard lock(mutex);
  ++alive.buffers;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  const auto at = comm->buffers.find(handle);
  if (at == comm->buffers.end()) return refuse(ncclInvalidArgument, "was not registered");
  const std::string wrong = not_reachable(handle, at->second);
  if (!wrong.empty()) return refuse(ncclInvalidUsage, "freed while it was registered");
  comm->buffers.erase(at);
  const std::lock_guard lock(mutex);
  --alive.buffers;
  return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  const ncclResult_t entered = enter("ncclRedOpCreatePreMulSum", comm);
  if (entered != ncclSuccess) return entered;
  if (type != ncclFloat16 || residence != ncclScalarHostImmediate) {
    return refuse(ncclInvalidArgument, "the virtual library scales fp16 by a host scalar only");
  }
  uint16_t bits;
  std::memcpy(&bits, scalar, 2);
  const int number = ncclNumOps + static_cast<int>(comm->operators.size());
  comm->operators[number] = {type, shardrun::math::widen(shardrun::Fp16{bits})};
  *op = static_cast<ncclRedOp_t>(number);
  const std::lock_guard lock(mutex);
  ++alive.operators;
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (comm->operators.erase(op) == 0) return refuse(ncclInvalidArgument, "no such operator");
  const std::lock_guard lock(mutex);
  --alive.operators;
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {Op::all_gather, static_cast<const std::byte*>(send),
               static_cast<std::byte*>(receive), count, type, ncclSum, 0});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {Op::reduce_scatter, static_cast<const std::byte*>(send),
               static_cast<std::byte*>(receive), count, type, op, 0});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {Op::broadcast, static_cast<const std::byte*>(send), static_cast<std::byte*>(receive),
               count, type, ncclSum, root});
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call(comm, stream,
              {Op::send, static_cast<const std::byte*>(data), nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(comm, stream,
              {Op::receive, nullptr, static_cast<std::byte*>(data), count, type, ncclSum, peer});
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (depth == 0) return refuse(ncclInvalidUsage, "a group that was not started");
  if (--depth > 0 || collected.empty()) return ncclSuccess;
  return submit_group(std::exchange(collected, {}));
}
}
