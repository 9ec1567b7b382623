// How waiting ends over threads when ranks fail, disagree or stay away.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace shardrun {

namespace {

using namespace std::chrono_literals;

std::string message_of(int ranks, FunctionRef<void(Communicator&)> body, double deadline = 0) {
  try {
    run_thread_ranks(ranks, body, deadline);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(ThreadCommunicator, TheCauseIsRethrownAndWaitersEnd) {
  std::atomic<int> ended = 0;
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(20ms);
      throw DataError("shard 7 is torn");
    }
    try {
      comm.barrier();
    } catch (const CommError& error) {
      EXPECT_STREQ(error.what(), "shard 7 is torn");
      ++ended;
      EXPECT_THROW(comm.barrier(), CommError);  // later calls too
      throw;
    }
  };
  EXPECT_THROW(run_thread_ranks(5, body), DataError);
  EXPECT_EQ(ended, 4);
}

TEST(ThreadCommunicator, AbortThenThrowIsStillTheCause) {
  for (int i = 0; i < 20; ++i) {
    EXPECT_THROW(run_thread_ranks(3,
                                  [](Communicator& comm) {
                                    if (comm.rank() == 0) {
                                      comm.abort("going down");
                                      std::this_thread::sleep_for(1ms);
                                      throw DataError("cause");
                                    }
                                    comm.barrier();
                                  }),
                 DataError);
  }
}

TEST(ThreadCommunicator, AbortReachesSplitGroups) {
  const auto body = [](Communicator& comm) {
    const std::unique_ptr<Communicator> pair = comm.split(comm.rank() / 2);
    if (comm.rank() == 3) throw DataError("cause");
    if (comm.rank() < 2) {
      comm.barrier();  // in the parent
    } else {
      pair->barrier();
    }
  };
  EXPECT_THROW(run_thread_ranks(4, body), DataError);
}

TEST(ThreadCommunicator, ARankThatStaysAwayIsNamedAtTheDeadline) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = message_of(
      3,
      [](Communicator& comm) {
        if (comm.rank() != 1) comm.barrier();
      },
      0.1);
  EXPECT_NE(message.find("for rank(s) 1"), std::string::npos) << message;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

TEST(ThreadCommunicator, RanksThatDisagreeAreNamed) {
  std::string message = message_of(2, [](Communicator& comm) {
    std::vector<int64_t> values(1);
    if (comm.rank() == 0) {
      comm.barrier();
    } else {
      comm.all_reduce_sum(values);
    }
  });
  EXPECT_NE(message.find("rank 0 calls barrier"), std::string::npos) << message;
  message = message_of(2, [](Communicator& comm) {
    std::vector<int64_t> values(1 + comm.rank());
    comm.all_reduce_sum(values);
  });
  EXPECT_NE(message.find("ranks disagree"), std::string::npos) << message;
  // One call more than the others make: nobody comes to it.
  message = message_of(
      3,
      [](Communicator& comm) {
        comm.barrier();
        if (comm.rank() == 0) comm.barrier();
      },
      0.1);
  EXPECT_NE(message.find("for rank(s) 1, 2"), std::string::npos) << message;
}

// Rank 3 aborts while the others, in a group of their own, read each other's leaves in place. They
// unwind at different moments, and no leaf may go before its readers are done: the address
// sanitizer sees it if one does.
TEST(ThreadCommunicator, LeavesOutliveTheirReadersWhenAnAbortComes) {
  constexpr int64_t kCount = 1 << 12;
  const auto body = [](Communicator& comm) {
    const std::unique_ptr<Communicator> part = comm.split(comm.rank() == 3);
    if (comm.rank() == 3) {
      std::this_thread::sleep_for(3ms);
      throw DataError("unwinding");
    }
    ThreadPool pool(1);
    Stream stream(DeviceKind::cpu, Isa::baseline, &pool);
    const std::unique_ptr<Memory> memory = make_heap_memory();
    std::vector<float> sum(kCount);
    int64_t found = kernels::kNothingFound;
    for (;;) {
      std::vector<float> leaf(kCount * part->size(), 1.0f);
      part->exchange_sum({{sum.data(), Dtype::fp32, {kCount}}, {}}, {&found, Dtype::int64, {1}},
                         {leaf.data(), Dtype::fp32, {kCount * part->size()}},
                         {0, part->size(), part->size(), 1}, *memory, stream);
    }
  };
  for (int round = 0; round < 20; ++round) EXPECT_THROW(run_thread_ranks(4, body), DataError);
}

// [Note: signals]
TEST(ThreadCommunicator, RanksTakeNoSignals) {
  run_thread_ranks(2, [](Communicator&) {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    for (int signal : {SIGTERM, SIGALRM, SIGPROF}) EXPECT_EQ(sigismember(&blocked, signal), 1);
  });
}

TEST(ThreadCommunicator, ManyShortCallsWithMoreRanksThanCores) {
  run_thread_ranks(8, [](Communicator& comm) {
    std::vector<int64_t> values(1);
    for (int64_t i = 0; i < 300; ++i) {
      values[0] = i + comm.rank();
      comm.all_reduce_sum(values);
      EXPECT_EQ(values[0], 8 * i + 28);
    }
  });
}

}  // namespace

}  // namespace shardrun
