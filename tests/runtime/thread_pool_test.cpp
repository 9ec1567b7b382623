// The threads of a rank: every task once, nothing lost when one throws, scratch that only grows.
#include "runtime/thread_pool.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "runtime/error.h"

namespace shardrun {
namespace {

class Pool : public testing::TestWithParam<int> {
 protected:
  int threads() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Threads, Pool, testing::Values(1, 2, 5));

TEST_P(Pool, RunsEveryTaskOnce) {
  ThreadPool pool(threads());
  EXPECT_EQ(pool.threads(), threads());
  for (int64_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> ran(tasks);
    std::atomic<bool> outside = false;
    pool.run(tasks, [&](int64_t task, int thread) {
      if (task < 0 || task >= tasks || thread < 0 || thread >= threads()) {
        outside = true;
      } else {
        ++ran[task];
      }
    });
    EXPECT_FALSE(outside);
    for (int64_t i = 0; i < tasks; ++i) ASSERT_EQ(ran[i], 1) << "task " << i << " of " << tasks;
  }
}

// Rounds follow closely: a worker that is late for one must not run, or miss, the next. What the
// bodies wrote is visible when run returns, without any atomics of the caller's.
TEST_P(Pool, ManyShortRounds) {
  ThreadPool pool(threads());
  std::vector<int> sums(5);
  for (int round = 0; round < 5000; ++round) {
    pool.run(5, [&](int64_t task, int) { sums[task] += round; });
  }
  for (int sum : sums) EXPECT_EQ(sum, 4999 * 5000 / 2);
}

TEST_P(Pool, AThreadNumberBelongsToOneTaskAtATime) {
  ThreadPool pool(threads());
  std::vector<std::atomic<int>> inside(threads());
  std::atomic<bool> shared = false;
  pool.run(200, [&](int64_t, int thread) {
    if (inside[thread].fetch_add(1) != 0) shared = true;
    std::this_thread::yield();
    inside[thread].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

TEST_P(Pool, TheFirstExceptionIsRethrown) {
  ThreadPool pool(threads());
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> running = 0, ran = 0;
    try {
      pool.run(100, [&](int64_t task, int) {
        ++running;
        if (task == 3) {
          --running;
          throw ConfigError("task {} of round {}", task, round);
        }
        ++ran;
        --running;
      });
      FAIL() << "swallowed";
    } catch (const ConfigError& error) {
      EXPECT_EQ(std::string(error.what()), fmt::format("task 3 of round {}", round));
    }
    EXPECT_EQ(running, 0) << "run returned while a body ran";
    EXPECT_LE(ran, 99);
    // The pool works on, and the error is not shown twice.
    std::atomic<int> after = 0;
    pool.run(10, [&](int64_t, int) { ++after; });
    EXPECT_EQ(after, 10);
  }
}

TEST_P(Pool, ManyExceptionsAreOne) {
  ThreadPool pool(threads());
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.run(20, [&](int64_t, int) { throw DataError("all of them"); }), DataError);
  }
  EXPECT_NO_THROW(pool.run(20, [](int64_t, int) {}));
}

// Several fail: the one that came first is told.
TEST(ThreadPool, LaterExceptionsAreDropped) {
  ThreadPool pool(2);
  std::atomic<int> arrived = 0;
  std::atomic<bool> thrown = false;
  try {
    pool.run(2, [&](int64_t task, int) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
      if (task == 0) {
        thrown = true;
        throw DataError("the first");
      }
      while (!thrown) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      throw DataError("the second");
    });
    FAIL() << "swallowed";
  } catch (const DataError& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
}

// Half a second of tasks that nobody needs any more.
TEST(ThreadPool, OtherThreadsStopAfterAnException) {
  ThreadPool pool(2);
  std::atomic<int> ran = 0;
  std::atomic<bool> thrown = false;
  EXPECT_THROW(pool.run(10000,
                        [&](int64_t task, int) {
                          if (task == 0) {
                            thrown = true;
                            throw DataError("stop");
                          }
                          while (!thrown) std::this_thread::yield();
                          std::this_thread::sleep_for(std::chrono::microseconds(50));
                          ++ran;
                        }),
               DataError);
  EXPECT_LT(ran, 9999);
}

// After a failure no new task starts: with one thread that is exact.
TEST(ThreadPool, NothingStartsAfterAnException) {
  ThreadPool pool(1);
  std::vector<int64_t> ran;
  EXPECT_THROW(pool.run(10,
                        [&](int64_t task, int) {
                          ran.push_back(task);
                          if (task == 4) throw DataError("stop");
                        }),
               DataError);
  EXPECT_EQ(ran, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(ThreadPool, SeveralThreadsReallyWork) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> arrived = 0;
  // Each task waits for the other two, so no thread can take two of them.
  pool.run(3, [&](int64_t, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
    std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_TRUE(seen.count(std::this_thread::get_id())) << "the caller works, too";
}

bool blocks(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_BLOCK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

// [Note: signals]
TEST(ThreadPool, NoHandlerRunsOnAThreadThatWorks) {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::atomic<int> arrived = 0, wrong = 0;
    pool.run(threads, [&](int64_t, int) {
      ++arrived;
      while (arrived < threads) std::this_thread::yield();
      pool.run(0, [](int64_t, int) {});  // nothing in it ends what holds outside
      for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGPROF, SIGCHLD}) {
        if (!blocks(signal)) ++wrong;
      }
      for (int signal : {SIGSEGV, SIGFPE, SIGABRT, SIGPIPE}) {
        if (blocks(signal)) ++wrong;
      }
    });
    EXPECT_EQ(wrong, 0) << threads << " threads";
    EXPECT_FALSE(blocks(SIGALRM)) << "the caller's mask is as before";
    EXPECT_THROW(pool.run(threads, [](int64_t, int) { throw DataError("stop"); }), DataError);
    EXPECT_FALSE(blocks(SIGALRM)) << "also after an error";
  }
}

TEST_P(Pool, ScratchGrowsAndStays) {
  ThreadPool pool(threads());
  EXPECT_EQ(pool.scratch_bytes(), 0u);
  std::vector<void*> first(threads());
  for (int t = 0; t < threads(); ++t) {
    first[t] = pool.scratch(t, 100);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first[t]) % 64, 0u);
    std::memset(first[t], t, 100);
    for (int other = 0; other < t; ++other) EXPECT_NE(first[t], first[other]);
  }
  const size_t small = pool.scratch_bytes();
  EXPECT_GE(small, 100u * threads());
  EXPECT_EQ(pool.scratch(0, 1), first[0]) << "a smaller wish keeps the memory";
  EXPECT_EQ(pool.scratch_bytes(), small);

  const size_t large = size_t{1} << 20;
  std::memset(pool.scratch(0, large), 1, large);
  EXPECT_GE(pool.scratch_bytes(), small + large - 4096);
  void* grown = pool.scratch(0, large);
  EXPECT_EQ(pool.scratch(0, 100), grown);
  const size_t now = pool.scratch_bytes();
  EXPECT_EQ(pool.scratch(0, large), grown);
  EXPECT_EQ(pool.scratch_bytes(), now);
  for (int t = 1; t < threads(); ++t) {
    EXPECT_EQ(static_cast<unsigned char*>(pool.scratch(t, 100))[99], t) << "another's changed";
  }
}

TEST_P(Pool, WorkersFlushDenormals) {
#if defined(__SSE2__)
  ThreadPool pool(threads());
  flush_denormals_on_this_thread();
  volatile float tiny = std::numeric_limits<float>::min();
  std::atomic<int> kept = 0;
  pool.run(100, [&](int64_t, int) {
    volatile float half = tiny * 0.5f;
    if (half != 0) ++kept;
  });
  EXPECT_EQ(kept, 0);
#endif
}

#ifndef __SANITIZE_ADDRESS__  // it needs the address space itself
// In a process of its own, with too little address space for that many stacks.
TEST(ThreadPoolDeathTest, ThreadsThatTheSystemRefusesAreAnError) {
  const auto start_too_many = [] {
    const rlimit limit{size_t{1} << 30, size_t{1} << 30};
    setrlimit(RLIMIT_AS, &limit);
    try {
      ThreadPool pool(100000);
    } catch (const DeviceError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(69);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(start_too_many(), testing::ExitedWithCode(69), "100000 threads asked for");
}
#endif

TEST(ThreadPool, NoThreadsAreRefused) { EXPECT_THROW(ThreadPool(0), InternalError); }

}  // namespace
}  // namespace shardrun
