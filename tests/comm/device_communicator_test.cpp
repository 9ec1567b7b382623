// What the transports of device tensors do when something is wrong: a partner that fails, stays away or
// calls something else, a library call that fails, a wait that was forgotten; and that their plans on
// `meta` are what they allocate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/comm/device_rank.h"

namespace shardrun::test {

namespace {

using testing::HasSubstr;

class DeviceCommunicator : public testing::Test {
 protected:
  void SetUp() override {
    virtual_cuda::reset();
    virtual_cuda::reset_nccl();
  }
  // Whatever happened, all was given back.
  void TearDown() override {
    EXPECT_EQ(virtual_cuda::living().allocations, 0);
    EXPECT_EQ(virtual_cuda::living().host_allocations, 0);
    EXPECT_EQ(virtual_cuda::living().events, 0);
    EXPECT_EQ(virtual_cuda::living_nccl().communicators, 0);
    EXPECT_EQ(virtual_cuda::living_nccl().buffers, 0);
    EXPECT_EQ(virtual_cuda::living_nccl().operators, 0);
  }
};

// The message that a run of ranks ends with; "" when it ends well.
template <typename Body>
std::string run(int ranks, Body&& body, double deadline_seconds = 30) {
  try {
    run_thread_ranks(ranks, body, deadline_seconds);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

OwnedTensor floats(DeviceRank& rank, int64_t n) {
  OwnedTensor out = allocate_tensor(*rank.memory, Dtype::fp32, Shape{n}, "test");
  const std::vector<float> values(static_cast<size_t>(n), 1.0f);
  copy_from_host(out.tensor, values.data(), rank.stream);
  return out;
}

// One of each call.
void call_all(DeviceRank& rank) {
  const int64_t size = rank.comm->size(), n = 64;
  const OwnedTensor full = floats(rank, n * size), shard = floats(rank, n);
  const OwnedTensor half = allocate_tensor(*rank.memory, Dtype::fp16, Shape{n * size}, "test");
  const OwnedTensor found = allocate_tensor(*rank.memory, Dtype::int64, Shape{1}, "found");
  rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
  rank.comm->broadcast(shard.tensor, 1, rank.stream);
  rank.comm->exchange_sum({shard.tensor, {}}, found.tensor, full.tensor, {0, size, size, 1},
                          *rank.memory, rank.stream);
  rank.comm->reduce_scatter(shard.tensor, full.tensor, *rank.memory, rank.stream);
  rank.comm->native_sum(shard.tensor, found.tensor, half.tensor, {0, 1, 1, 1}, *rank.memory,
                        rank.stream);
  rank.comm->synchronize(rank.stream);
  rank.comm->barrier();
}

TEST_F(DeviceCommunicator, CallsAllWithoutAFailure) {
  EXPECT_EQ(run(3,
                [](Communicator& host) {
                  DeviceRank rank(host, Transport::nccl, 20);
                  call_all(rank);
                }),
            "");
  EXPECT_EQ(virtual_cuda::living_nccl().aborted, 0);
}

TEST_F(DeviceCommunicator, TwoRanksOnOneGpuAreNamedBeforeNcclSaysIt) {
  const std::string message = run(3, [](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 20, host.rank() == 0 ? 5 : 1);
  });
  EXPECT_THAT(message, HasSubstr("ranks 1 and 2 sit on one GPU"));
  EXPECT_THAT(message, HasSubstr("--comm staged"));
}

// The rank that fails says which call of which rank, and takes the others with it.
TEST_F(DeviceCommunicator, EveryFailingCallEndsAllRanks) {
  const std::pair<const char*, const char*> calls[] = {
      {"ncclCommInitRankConfig", "ncclCommInitRankConfig"},
      {"ncclAllGather", "all_gather"},
      {"ncclBroadcast", "broadcast"},
      {"ncclSend", "exchange"},
      {"ncclRecv", "exchange"},
      {"ncclReduceScatter", "reduce_scatter"},
      {"ncclRedOpCreatePreMulSum", "ncclRedOpCreatePreMulSum"}};
  for (const auto& [function, named] : calls) {
    virtual_cuda::reset_nccl();
    virtual_cuda::fail_nccl(function, 1, ncclSystemError, 1);
    const std::string message = run(3, [](Communicator& host) {
      DeviceRank rank(host, Transport::nccl, 20);
      call_all(rank);
    });
    EXPECT_THAT(message, HasSubstr(fmt::format("nccl: rank 1 of 3: {}: ", named))) << function;
    EXPECT_THAT(message, HasSubstr("a planned failure")) << function;
  }
}

TEST_F(DeviceCommunicator, RankZeroWithoutAnIdTellsAll) {
  virtual_cuda::fail_nccl("ncclGetUniqueId", 1, ncclInternalError);
  EXPECT_THAT(run(2, [](Communicator& host) { DeviceRank rank(host, Transport::nccl, 20); }),
              HasSubstr("rank 0 of 2: ncclGetUniqueId: internal error"));
}

// An error that comes while work is under way is found in synchronize().
TEST_F(DeviceCommunicator, AsynchronousErrorsAreFound) {
  std::atomic<bool> armed = false;
  const std::string message = run(2, [&](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 20);
    const OwnedTensor full = floats(rank, 8), shard = floats(rank, 4);
    host.barrier();
    if (host.rank() == 1) {  // rank 0's call stays without its partner
      while (!armed) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      virtual_cuda::fail_nccl("ncclCommGetAsyncError", 1, ncclSystemError, 0);
      host.barrier();
      return;
    }
    rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
    armed = true;
    rank.comm->synchronize(rank.stream);
  });
  EXPECT_THAT(message, HasSubstr("nccl: rank 0 of 2: all_gather: unhandled system error"));
}

TEST_F(DeviceCommunicator, ARankThatThrowsWakesThoseThatWait) {
  const auto start = std::chrono::steady_clock::now();
  const std::string message = run(3, [](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 0);
    const OwnedTensor full = floats(rank, 12), shard = floats(rank, 4);
    if (host.rank() == 2) throw DataError("the third has no data");
    rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
    rank.comm->synchronize(rank.stream);
  });
  EXPECT_EQ(message, "the third has no data");
  EXPECT_EQ(virtual_cuda::living_nccl().aborted, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_F(DeviceCommunicator, AbortEndsHostCallsAndTensorsAlike) {
  EXPECT_EQ(run(2,
                [](Communicator& host) {
                  DeviceRank rank(host, Transport::nccl, 0);
                  if (host.rank() == 0) {
                    rank.comm->abort("enough");
                    EXPECT_THROW(rank.comm->barrier(), CommError);
                  }
                  const OwnedTensor full = floats(rank, 8), shard = floats(rank, 4);
                  rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
                  rank.comm->synchronize(rank.stream);
                }),
            "enough");
}

TEST_F(DeviceCommunicator, ACallWithoutItsPartnerEndsAtTheDeadline) {
  std::atomic<bool> over = false;
  const std::string message = run(2, [&](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 0.3);
    const OwnedTensor full = floats(rank, 8), shard = floats(rank, 4);
    if (host.rank() == 1) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
    try {
      rank.comm->synchronize(rank.stream);
    } catch (...) {
      over = true;
      throw;
    }
  });
  EXPECT_EQ(message, "nccl: rank 0 of 2: all_gather: waited 0.3 s for the other ranks");
}

TEST_F(DeviceCommunicator, MakingItWithoutAllRanksEndsAtTheDeadline) {
  const std::string message = run(2, [&](Communicator& host) {
    if (host.rank() == 0) DeviceRank rank(host, Transport::nccl, 0.3);
    // Answers what is asked before NCCL, and does not come to NCCL.
    const auto device = make_cuda_device(1);
    ranks_on_one_gpu(host, *device);
    std::byte id[sizeof(ncclUniqueId) + sizeof(int)];
    host.broadcast(std::span(id), 0);
    host.barrier();
  });
  EXPECT_EQ(message, "nccl: rank 0 of 2: ncclCommInitRankConfig: waited 0.3 s for the other ranks");
}

TEST_F(DeviceCommunicator, RanksThatCallDifferentThingsAreBothNamed) {
  const std::string message = run(2, [](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 20);
    const OwnedTensor full = floats(rank, 8), shard = floats(rank, 4);
    if (host.rank() == 0) {
      rank.comm->all_gather(full.tensor, shard.tensor, rank.stream);
    } else {
      rank.comm->reduce_scatter(shard.tensor, full.tensor, *rank.memory, rank.stream);
    }
    rank.comm->synchronize(rank.stream);
    rank.stream.synchronize();
  });
  EXPECT_THAT(message, HasSubstr("ncclAllGather(16 of type 0"));
  EXPECT_THAT(message, HasSubstr("ncclReduceScatter(4 of type 7"));
}

TEST_F(DeviceCommunicator, RegistersMemoryAndGivesItBackFirst) {
  EXPECT_EQ(run(2,
                [](Communicator& host) {
                  DeviceRank rank(host, Transport::nccl, 20);
                  const OwnedTensor memory = floats(rank, 1000);
                  {
                    const auto comm = make_nccl_communicator(host, *rank.device, 20);
                    comm->register_memory(memory.tensor.data(), memory.tensor.bytes());
                    host.barrier();
                    EXPECT_EQ(virtual_cuda::living_nccl().buffers, 2);
                    host.barrier();
                  }
                  host.barrier();
                  EXPECT_EQ(virtual_cuda::living_nccl().buffers, 0);
                  host.barrier();
                }),
            "");
}

TEST_F(DeviceCommunicator, WantsTensorsOfTheGpu) {
  const std::string message = run(1, [](Communicator& host) {
    DeviceRank rank(host, Transport::nccl, 20);
    Host cpu;
    std::vector<float> values(4);
    rank.comm->broadcast(Tensor(values.data(), Dtype::fp32, Shape{4}), 0, cpu.stream);
  });
  EXPECT_THAT(message, HasSubstr("communicator \"nccl\" got a stream of kind cpu"));
  EXPECT_THAT(run(1,
                  [](Communicator& host) {
                    DeviceRank rank(host, Transport::staged, 0);
                    host.broadcast(floats(rank, 4).tensor, 0, rank.stream);
                  }),
              HasSubstr("communicator \"thread\" got a stream of kind cuda"));
}

// A staged transport serves host tensors, too.
TEST_F(DeviceCommunicator, StagedHandsHostTensorsOn) {
  for (const ContractCase& contract : contract_cases()) {
    EXPECT_EQ(run(3,
                  [&](Communicator& host) {
                    DeviceRank rank(host, Transport::staged, 0);
                    Host cpu;
                    contract.body(*rank.comm, cpu.place);
                  }),
              "")
        << contract.name;
  }
}

// ---- waits

// Four pieces from rank 0 to rank 1, each rank on its GPU; the message, or "" when all is well.
std::string broadcast_pieces() {
  return run(2, [](Communicator& host) {
    DeviceRank rank(host, Transport::staged, 0, host.rank());
    const int64_t n = static_cast<int64_t>(4 * kStagedBufferBytes / 2 / sizeof(float));
    std::vector<float> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      values[static_cast<size_t>(i)] = host.rank() == 0 ? static_cast<float>(i) : -1.0f;
    }
    OwnedTensor held = allocate_tensor(*rank.memory, Dtype::fp32, Shape{n}, "test");
    copy_from_host(held.tensor, values.data(), rank.stream);
    rank.comm->broadcast(held.tensor, 0, rank.stream);
    rank.stream.synchronize();
    copy_to_host(values.data(), held.tensor, rank.stream);
    rank.stream.synchronize();
    for (int64_t i = 0; i < n; ++i) {
      SHARDRUN_CHECK(values[static_cast<size_t>(i)] == static_cast<float>(i), "element {} is {}", i,
                     values[static_cast<size_t>(i)]);
    }
  });
}

// Work runs as late as it may: each wait that is left out shows.
TEST_F(DeviceCommunicator, EveryWaitOfStagingIsNeeded) {
  ASSERT_EQ(broadcast_pieces(), "");
  const int64_t sends = virtual_cuda::calls("cudaEventSynchronize", 0);
  const int64_t receives = virtual_cuda::calls("cudaEventSynchronize", 1);
  // The destructor waits for both pairs, too: two calls that only unwinding needs.
  EXPECT_EQ(sends, 4 + 2);
  EXPECT_EQ(receives, 2 + 2);
  for (int device : {0, 1}) {
    for (int64_t n = 1; n <= (device == 0 ? sends : receives) - 2; ++n) {
      virtual_cuda::reset();
      virtual_cuda::drop("cudaEventSynchronize", n, device);
      EXPECT_THAT(broadcast_pieces(), HasSubstr("element"))
          << "wait " << n << " of device " << device;
      EXPECT_EQ(virtual_cuda::faults_met(), 1);
    }
  }
}

// Pinned memory goes when its copies have run, also where nobody else waits for them: those onto the
// GPU of what came last, and those off the GPU of what a partner that failed is never sent.
TEST_F(DeviceCommunicator, StagingOutlivesItsCopies) {
  const int64_t n = static_cast<int64_t>(2 * kStagedBufferBytes / 2 / sizeof(float));
  EXPECT_EQ(run(2,
                [&](Communicator& host) {
                  DeviceRank rank(host, Transport::staged, 0, host.rank());
                  const OwnedTensor held = floats(rank, n);
                  rank.comm->broadcast(held.tensor, 0, rank.stream);
                  rank.comm.reset();
                }),
            "");
  EXPECT_EQ(run(2,
                [&](Communicator& host) {
                  DeviceRank rank(host, Transport::staged, 0, host.rank());
                  const OwnedTensor held = floats(rank, n);
                  rank.stream.synchronize();
                  if (host.rank() == 1) throw DataError("rank 1 has had enough");
                  rank.comm->broadcast(held.tensor, 0, rank.stream);
                }),
            "rank 1 has had enough");
}

// ---- plans

// The program that meta records is the one that the transport runs, on every rank.
TEST_F(DeviceCommunicator, AllocatesWhatMetaPlanned) {
  for (Transport transport : {Transport::staged, Transport::nccl}) {
    const auto program = [](Communicator& comm, Memory& memory, Stream& stream) {
      const int64_t size = comm.size(), n = 600;
      const OwnedTensor sum = allocate_tensor(memory, Dtype::fp32, Shape{n}, "sum");
      const OwnedTensor found = allocate_tensor(memory, Dtype::int64, Shape{1}, "found");
      for (Dtype wire : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        const OwnedTensor leaf = allocate_tensor(memory, wire, Shape{n * size}, "leaf");
        comm.exchange_sum({sum.tensor, {}}, found.tensor, leaf.tensor, {0, 1, 1, 1}, memory,
                          stream);
        comm.native_sum(sum.tensor, found.tensor, leaf.tensor, {0, 1, 1, 1}, memory, stream);
      }
    };
    EXPECT_EQ(run(3,
                  [&](Communicator& host) {
                    DeviceRank rank(host, transport, 20);
                    RecordingMemory recorder;
                    Stream meta(DeviceKind::meta, Isa::baseline, nullptr);
                    const auto comm = make_meta_communicator(
                        host.rank(), host.size(), transport == Transport::nccl ? "nccl" : "staged");
                    recorder.begin("sums");
                    program(*comm, recorder, meta);
                    recorder.end();
                    const auto arena = make_arena_memory(recorder.plan(), rank.device.get());
                    arena->begin("sums");
                    program(*rank.comm, *arena, rank.stream);
                    arena->end();
                    rank.comm->synchronize(rank.stream);
                  }),
              "");
  }
}

TEST_F(DeviceCommunicator, StagingIsOfAFixedSize) {
  run(2, [](Communicator& host) {
    const size_t before = virtual_cuda::living().host_allocations;
    host.barrier();
    DeviceRank rank(host, Transport::staged, 0);
    host.barrier();
    EXPECT_EQ(virtual_cuda::living().host_allocations - before, 2 * 5);
    EXPECT_EQ(staged_host_bytes(2), 5 * kStagedBufferBytes);
    host.barrier();
  });
}

}  // namespace

}  // namespace shardrun::test
