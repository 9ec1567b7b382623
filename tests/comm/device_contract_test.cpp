// The contract on virtual GPUs, ranks as threads: staged through host memory with all ranks on one
// GPU, and NCCL with a GPU for each. Schedules differ by seed, so what is not waited for shows.
#include <gtest/gtest.h>

#include "tests/comm/device_rank.h"

namespace shardrun::test {

namespace {

using Parameters = std::tuple<Transport, int, uint64_t>;  // ranks, seed

class DeviceContract : public testing::TestWithParam<Parameters> {};

TEST_P(DeviceContract, Holds) {
  const auto [transport, ranks, seed] = GetParam();
  virtual_cuda::Settings settings;
  settings.seed = seed;
  virtual_cuda::reset(settings);
  for (const ContractCase& contract : contract_cases()) {
    SCOPED_TRACE(contract.name);
    const auto on_gpu = [&](Communicator& host) {
      DeviceRank rank(host, transport, 100);
      contract.body(*rank.comm, rank.place);
    };
    EXPECT_NO_THROW(run_thread_ranks(ranks, on_gpu, 100));
  }
  EXPECT_EQ(virtual_cuda::living().allocations, 0);
  EXPECT_EQ(virtual_cuda::living().host_allocations, 0);
  EXPECT_EQ(virtual_cuda::living_nccl().communicators, 0);
}

INSTANTIATE_TEST_SUITE_P(Staged, DeviceContract,
                         testing::Combine(testing::Values(Transport::staged),
                                          testing::Values(1, 2, 3, 4), testing::Values(0, 1, 5)));
INSTANTIATE_TEST_SUITE_P(Nccl, DeviceContract,
                         testing::Combine(testing::Values(Transport::nccl),
                                          testing::Values(1, 2, 3, 4), testing::Values(0, 1, 5)));
INSTANTIATE_TEST_SUITE_P(NcclWide, DeviceContract,
                         testing::Combine(testing::Values(Transport::nccl), testing::Values(7),
                                          testing::Values(2)));

}  // namespace

}  // namespace shardrun::test
