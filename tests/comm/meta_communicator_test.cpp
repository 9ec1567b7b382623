// The meta communicator counts and allocates what the transport that it stands for does.
#include <gtest/gtest.h>

#include <vector>

#include "comm/communicator.h"

namespace shardrun {

namespace {

constexpr int64_t kCount = 300;  // a slice that is no multiple of the alignment

void a_step(Communicator& comm, Memory& memory, Stream& stream, void* full, void* sum) {
  const int64_t size = comm.size();
  int64_t found = kernels::kNothingFound;
  const Tensor whole(full, Dtype::bf16, {kCount * size});
  comm.all_gather(whole, whole.flat(comm.rank() * kCount, kCount), stream);
  for (int64_t count = 0; count <= size; ++count) {
    comm.exchange_sum({{sum, Dtype::fp32, {kCount}}, {}}, {&found, Dtype::int64, {1}}, whole,
                      {0, count, size, 1}, memory, stream);
  }
}

TEST(MetaCommunicator, CountsTheTrafficOfThreads) {
  for (int size : {1, 2, 3, 5}) {
    run_thread_ranks(size, [](Communicator& comm) {
      ThreadPool pool(1);
      Stream stream(DeviceKind::cpu, Isa::baseline, &pool);
      const std::unique_ptr<Memory> memory = make_heap_memory();
      std::vector<uint16_t> full(kCount * comm.size());
      std::vector<float> sum(kCount);
      a_step(comm, *memory, stream, full.data(), sum.data());

      const auto meta = make_meta_communicator(comm.rank(), comm.size(), "thread");
      Stream meta_stream(DeviceKind::meta, Isa::baseline, &pool);
      a_step(*meta, *memory, meta_stream, nullptr, nullptr);
      EXPECT_EQ(meta->traffic().sent_bytes, comm.traffic().sent_bytes);
      EXPECT_EQ(meta->traffic().received_bytes, comm.traffic().received_bytes);
      EXPECT_EQ(meta->traffic().calls, comm.traffic().calls);
    });
  }
}

MemoryPlan plan_of(int rank, int size, const char* like) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::meta, Isa::baseline, &pool);
  RecordingMemory memory;
  const auto meta = make_meta_communicator(rank, size, like);
  memory.begin("step");
  a_step(*meta, memory, stream, nullptr, nullptr);
  memory.end();
  return memory.plan();
}

TEST(MetaCommunicator, StagesLikeItsTransport) {
  EXPECT_TRUE(plan_of(0, 3, "thread").programs.at(0).blocks.empty());

  // 600 bytes a slice, 768 in a slot, two peers: the same whoever sends, because a program's
  // allocations repeat.
  const MemoryPlan plan = plan_of(1, 3, "mpi");
  std::vector<size_t> bytes;
  for (const MemoryPlan::Block& block : plan.programs.at(0).blocks) {
    EXPECT_EQ(block.label, "exchange staging");
    bytes.push_back(block.bytes);
  }
  EXPECT_EQ(bytes, (std::vector<size_t>{1536, 1536, 1536, 1536}));
}

TEST(MetaCommunicator, HostValuesComeFromRanksLikeThisOne) {
  const auto meta = make_meta_communicator(2, 4, "mpi");
  EXPECT_STREQ(meta->transport(), "meta:mpi");
  std::vector<int64_t> values{3, -1};
  meta->all_reduce_sum(values);
  EXPECT_EQ(values, (std::vector<int64_t>{12, -4}));
  meta->all_reduce_max(values);
  EXPECT_EQ(values, (std::vector<int64_t>{12, -4}));
  const char mine[] = {'x', 'y'};
  char all[8] = {};
  meta->all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(mine)));
  EXPECT_EQ(std::string(all, 8), "xyxyxyxy");
  EXPECT_THROW(meta->split(0), CommError);
  EXPECT_THROW(make_meta_communicator(0, 1, "pigeon"), UsageError);
}

TEST(MetaCommunicator, RefusesStreamsThatHaveMemory) {
  ThreadPool pool(1);
  Stream stream(DeviceKind::cpu, Isa::baseline, &pool);
  const auto meta = make_meta_communicator(0, 1, "mpi");
  std::vector<float> values(1);
  const Tensor tensor(values.data(), Dtype::fp32, {1});
  EXPECT_THROW(meta->all_gather(tensor, tensor, stream), InternalError);
}

}  // namespace

}  // namespace shardrun
