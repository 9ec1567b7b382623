// Ranks as threads of one process. A call publishes where its bytes lie, meets the others, reads
// theirs in place, and meets them again before anybody's bytes may change. Called by tests,
// sanitizer runs and runs of one rank.
//
// [Note: leaving a window] Between the two meetings ("window") other ranks read this rank's memory.
// A rank that leaves by an exception frees that memory, so it too goes through the second meeting,
// which therefore heeds neither abort nor deadline. It ends all the same: inside a window everybody
// only copies and folds, and whoever passed the first meeting reaches the second.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "runtime/signals.h"

namespace shardrun {

namespace {

enum class Op : uint8_t {
  all_gather,
  exchange,
  reduce_scatter,
  all_reduce_sum,
  all_reduce_max,
  broadcast,
  barrier,
  split
};

const char* name_of(Op op) {
  constexpr const char* kNames[] = {"all_gather",     "exchange",       "reduce_scatter",
                                    "all_reduce_sum", "all_reduce_max", "broadcast",
                                    "barrier",        "split"};
  return kNames[static_cast<int>(op)];
}

struct Call {
  Op op = Op::barrier;
  size_t bytes = 0;
  int argument = 0;                 // root, number of senders
  const std::byte* data = nullptr;  // what the others may read
  int color = 0;                    // split: the one thing that may differ
};

// The meeting place of one communicator's ranks.
struct Group {
  explicit Group(int n) : size(n), calls(n), arrivals(n, 0) {}

  const int size;
  std::vector<Call> calls;         // slot r is rank r's, written before it arrives
  std::vector<uint64_t> arrivals;  // of each rank, to name who is missing
  int arrived = 0;
  std::atomic<uint64_t> generation{0};  // meetings completed
  std::condition_variable changed;
  std::map<std::pair<int64_t, int>, Group*> children;  // by (number of the split, colour)
};

// All groups split from one, under one lock: meetings are short, and an abort must reach them all.
class Family {
 public:
  explicit Family(double deadline_seconds) : deadline_seconds_(deadline_seconds) {}

  Group* add_group(int size) {
    std::lock_guard lock(mutex_);
    return add_group_locked(size);
  }

  Group* child(Group& parent, int64_t split, int color, int size) {
    std::lock_guard lock(mutex_);
    Group*& group = parent.children[{split, color}];
    if (group == nullptr) group = add_group_locked(size);
    return group;
  }

  void abort(const std::string& message) {
    std::lock_guard lock(mutex_);
    abort_locked(message);
  }

  void require_alive() {
    std::lock_guard lock(mutex_);
    if (aborted_) throw CommError("{}", message_);
  }

  // First meeting: throws when the family is aborted or nobody comes.
  void enter(Group& group, int rank) { meet(group, rank, false); }
  // Second meeting: see [Note: leaving a window].
  void leave(Group& group, int rank) noexcept { meet(group, rank, true); }

 private:
  static constexpr int kYields = 64;  // cheap while partners are near; then sleep

  Group* add_group_locked(int size) {
    groups_.push_back(std::make_unique<Group>(size));
    return groups_.back().get();
  }

  void abort_locked(const std::string& message) {
    if (!aborted_) message_ = message;  // the first one is the cause
    aborted_ = true;
    for (const auto& group : groups_) group->changed.notify_all();
  }

  void meet(Group& group, int rank, bool leaving) {
    std::unique_lock lock(mutex_);
    if (aborted_ && !leaving) throw CommError("{}", message_);
    ++group.arrivals[rank];
    const uint64_t generation = group.generation.load();
    if (++group.arrived == group.size) {
      group.arrived = 0;
      group.generation.store(generation + 1, std::memory_order_release);
      group.changed.notify_all();
      return;
    }
    lock.unlock();
    for (int i = 0; i < kYields; ++i) {
      if (group.generation.load(std::memory_order_acquire) != generation) return;
      std::this_thread::yield();
    }
    lock.lock();
    const auto over = [&] {
      return group.generation.load() != generation || (aborted_ && !leaving);
    };
    if (leaving || deadline_seconds_ <= 0) {
      group.changed.wait(lock, over);
    } else if (!group.changed.wait_for(lock, std::chrono::duration<double>(deadline_seconds_),
                                       over)) {
      abort_locked(late_message(group, rank));
    }
    // Whoever was met stays in, aborted or not: the others count on its second arrival.
    if (group.generation.load() == generation) throw CommError("{}", message_);
  }

  std::string late_message(const Group& group, int rank) const {
    std::string missing;
    for (int r = 0; r < group.size; ++r) {
      if (group.arrivals[r] == group.arrivals[rank]) continue;
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
    }
    return fmt::format("{}: rank {} of {} waited {} s for rank(s) {}",
                       name_of(group.calls[rank].op), rank, group.size, deadline_seconds_, missing);
  }

  const double deadline_seconds_;
  std::mutex mutex_;
  bool aborted_ = false;
  std::string message_;
  std::vector<std::unique_ptr<Group>> groups_;
};

class Window {
 public:
  Window(Family& family, Group& group, int rank, const Call& call)
      : family_(family), group_(group), rank_(rank) {
    group_.calls[rank_] = call;
    family_.enter(group_, rank_);
  }
  ~Window() { family_.leave(group_, rank_); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // What everybody brought. All ranks see the same slots, so all throw or none.
  const std::vector<Call>& calls() const {
    const Call& first = group_.calls[0];
    for (int r = 1; r < group_.size; ++r) {
      const Call& call = group_.calls[r];
      if (call.op == first.op && call.bytes == first.bytes && call.argument == first.argument) {
        continue;
      }
      throw CommError(
          "ranks disagree: rank 0 calls {} ({} bytes, argument {}), rank {} calls {} ({} "
          "bytes, argument {})",
          name_of(first.op), first.bytes, first.argument, r, name_of(call.op), call.bytes,
          call.argument);
    }
    return group_.calls;
  }

 private:
  Family& family_;
  Group& group_;
  int rank_;
};

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(Family& family, Group& group, int rank)
      : Communicator(rank, group.size), family_(family), group_(group) {}

  const char* transport() const override { return "thread"; }
  void abort(const std::string& message) noexcept override { family_.abort(message); }
  void require_alive() const override { family_.require_alive(); }

 private:
  void do_all_gather_bytes(std::byte* full, const std::byte* shard, size_t shard_bytes) override {
    Window window(family_, group_, rank(), {Op::all_gather, shard_bytes, 0, shard});
    const std::vector<Call>& calls = window.calls();
    for (int r = 0; r < size(); ++r) {
      copy_bytes(full + r * shard_bytes, calls[r].data, shard_bytes);
    }
  }

  void do_exchange_bytes(const std::byte* mine, size_t slice_bytes, int senders, Memory&,
                         FunctionRef<void(int source, const std::byte* slice)> take) override {
    Window window(family_, group_, rank(), {Op::exchange, slice_bytes, senders, mine});
    const std::vector<Call>& calls = window.calls();
    for (int r = 0; r < senders; ++r) {
      const std::byte* theirs = calls[r].data;
      take(r, theirs == nullptr ? nullptr : theirs + rank() * slice_bytes);
    }
  }

  // Starts with its own slice and goes round, like a ring: an order that knows the rank.
  void do_reduce_scatter(float* shard, const void* data, Dtype, int64_t count, Memory&,
                         Stream&) override {
    const float* full = static_cast<const float*>(data);
    Window window(family_, group_, rank(),
                  {Op::reduce_scatter, static_cast<size_t>(count) * sizeof(float), 0,
                   reinterpret_cast<const std::byte*>(full)});
    const std::vector<Call>& calls = window.calls();
    const size_t own = static_cast<size_t>(rank()) * count * sizeof(float);
    copy_bytes(reinterpret_cast<std::byte*>(shard), calls[rank()].data + own,
               count * sizeof(float));
    for (int k = 1; k < size(); ++k) {
      const std::byte* theirs = calls[(rank() + k) % size()].data + own;
      const float* slice = reinterpret_cast<const float*>(theirs);
      for (int64_t i = 0; i < count; ++i) shard[i] += slice[i];
    }
  }

  void do_all_reduce(std::span<int64_t> values, bool max) override {
    {
      Window window(family_, group_, rank(),
                    {max ? Op::all_reduce_max : Op::all_reduce_sum, values.size_bytes(), 0,
                     reinterpret_cast<const std::byte*>(values.data())});
      reduced_.assign(values.begin(), values.end());
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const int64_t* theirs = reinterpret_cast<const int64_t*>(window.calls()[r].data);
        for (size_t i = 0; i < values.size(); ++i) {
          reduced_[i] = max ? std::max(reduced_[i], theirs[i])
                            : static_cast<int64_t>(static_cast<uint64_t>(reduced_[i]) +
                                                   static_cast<uint64_t>(theirs[i]));
        }
      }
    }
    std::copy(reduced_.begin(), reduced_.end(), values.begin());
  }

  void do_broadcast_bytes(std::byte* bytes, size_t count, int root) override {
    Window window(family_, group_, rank(), {Op::broadcast, count, root, bytes});
    copy_bytes(bytes, window.calls()[root].data, count);
  }

  void do_barrier() override {
    Window window(family_, group_, rank(), {});
    window.calls();
  }

  std::unique_ptr<Communicator> do_split(int color) override {
    Window window(family_, group_, rank(), {Op::split, 0, 0, nullptr, color});
    const std::vector<Call>& calls = window.calls();
    int members = 0, place = 0;
    for (int r = 0; r < size(); ++r) {
      if (calls[r].color != color) continue;
      if (r < rank()) ++place;
      ++members;
    }
    Group* group = family_.child(group_, splits_++, color, members);
    return std::make_unique<ThreadCommunicator>(family_, *group, place);
  }

  Family& family_;
  Group& group_;
  int64_t splits_ = 0;  // the same on all ranks: they name the child by it
  std::vector<int64_t> reduced_;
};

class ThreadGroupOfFamily : public ThreadGroup {
 public:
  ThreadGroupOfFamily(int size, double deadline_seconds)
      : family_(deadline_seconds), group_(*family_.add_group(size)) {}

  std::unique_ptr<Communicator> communicator(int rank) override {
    SHARDRUN_CHECK(rank >= 0 && rank < group_.size, "rank {} of {}", rank, group_.size);
    return std::make_unique<ThreadCommunicator>(family_, group_, rank);
  }

 private:
  Family family_;
  Group& group_;
};

// The first exception, except that a CommError gives way to another kind: a rank that aborts the
// group and only then throws may come second to those whom it ended.
class Cause {
 public:
  void offer(std::exception_ptr exception, bool comm_error) {
    std::lock_guard lock(mutex_);
    if (exception_ && (comm_error || !comm_error_)) return;
    exception_ = exception;
    comm_error_ = comm_error;
  }
  void rethrow() const {
    if (exception_) std::rethrow_exception(exception_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr exception_;
  bool comm_error_ = false;
};

}  // namespace

std::shared_ptr<ThreadGroup> ThreadGroup::make(int size, double deadline_seconds) {
  SHARDRUN_CHECK(size >= 1, "a group of {} ranks", size);
  return std::make_shared<ThreadGroupOfFamily>(size, deadline_seconds);
}

void run_thread_ranks(int size, FunctionRef<void(Communicator&)> body, double deadline_seconds) {
  const std::shared_ptr<ThreadGroup> group = ThreadGroup::make(size, deadline_seconds);
  Cause cause;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const BlockSignals blocked;  // [Note: signals]
      flush_denormals_on_this_thread();
      const std::unique_ptr<Communicator> communicator = group->communicator(rank);
      std::string message;
      try {
        body(*communicator);
        return;
      } catch (const CommError& error) {
        message = error.what();
        cause.offer(std::current_exception(), true);
      } catch (const std::exception& error) {
        message = error.what();
        cause.offer(std::current_exception(), false);
      } catch (...) {
        message = "unknown exception";
        cause.offer(std::current_exception(), false);
      }
      communicator->abort(message);
    });
  }
  for (std::thread& thread : threads) thread.join();
  cause.rethrow();
}

}  // namespace shardrun
