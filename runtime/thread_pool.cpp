#include "runtime/thread_pool.h"

#if defined(__SSE2__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/error.h"
#include "runtime/signals.h"

namespace shardrun {

void flush_denormals_on_this_thread() {
#if defined(__SSE2__)
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
#endif
}

struct ThreadPool::State {
  using Body = FunctionRef<void(int64_t, int)>;
  struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;
  };

  std::vector<Scratch> scratch;
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable start, finish;
  uint64_t round = 0;
  std::atomic<uint64_t> seen_round{0};  // of `round`, for workers that spin
  int busy = 0;
  bool ending = false;

  const Body* body = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;

  void end() {
    {
      std::lock_guard lock(mutex);
      ending = true;
    }
    start.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void work(int thread) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        (*body)(task, thread);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(tasks);
      }
    }
  }

  void live(int thread) {
    const BlockSignals blocked;  // [Note: signals]
    flush_denormals_on_this_thread();
    uint64_t done = 0;
    for (;;) {
      // Rounds follow one another closely inside a step: look a little before sleeping.
      for (int i = 0; i < 2000 && seen_round.load(std::memory_order_relaxed) == done; ++i) {
#if defined(__SSE2__)
        _mm_pause();
#endif
      }
      {
        std::unique_lock lock(mutex);
        start.wait(lock, [&] { return ending || round != done; });
        if (ending) return;
        done = round;
      }
      work(thread);
      std::lock_guard lock(mutex);
      if (--busy == 0) finish.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  SHARDRUN_CHECK(threads >= 1, "{} threads", threads);
  state_->scratch.resize(threads);
  try {
    for (int t = 1; t < threads; ++t) {
      state_->workers.emplace_back([state = state_.get(), t] { state->live(t); });
    }
  } catch (const std::system_error& error) {  // the ones that did start must end first
    const size_t started = state_->workers.size() + 1;
    state_->end();
    throw DeviceError("{} threads asked for, the system gives {} ({}); lower --threads", threads,
                      started, error.what());
  }
}

ThreadPool::~ThreadPool() {
  state_->end();
  for (State::Scratch& scratch : state_->scratch) std::free(scratch.data);
}

int ThreadPool::threads() const { return static_cast<int>(state_->scratch.size()); }

void ThreadPool::run(int64_t tasks, FunctionRef<void(int64_t task, int thread)> body) {
  State& state = *state_;
  const BlockSignals blocked;  // [Note: signals]
  if (tasks <= 1 || state.workers.empty()) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  {
    std::lock_guard lock(state.mutex);
    state.body = &body;
    state.tasks = tasks;
    state.next.store(0);
    state.error = nullptr;
    state.busy = static_cast<int>(state.workers.size());
    ++state.round;
    state.seen_round.store(state.round);
  }
  state.start.notify_all();
  state.work(0);
  std::unique_lock lock(state.mutex);
  state.finish.wait(lock, [&] { return state.busy == 0; });
  if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
}

void* ThreadPool::scratch(int thread, size_t bytes) {
  State::Scratch& scratch = state_->scratch[thread];
  if (bytes > scratch.bytes) {
    std::free(scratch.data);
    scratch = {};  // what stands if the next line finds no memory
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.data = std::aligned_alloc(64, rounded);
    if (!scratch.data) throw DeviceError("{} bytes of scratch memory for a thread: not there", bytes);
    scratch.bytes = rounded;
  }
  return scratch.data;
}

size_t ThreadPool::scratch_bytes() const {
  size_t sum = 0;
  for (const State::Scratch& scratch : state_->scratch) sum += scratch.bytes;
  return sum;
}

}  // namespace shardrun
