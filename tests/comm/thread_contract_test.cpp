// The contract over threads: every case at every world size, ranks often more than cores.
#include <gtest/gtest.h>

#include "tests/comm/contract.h"

namespace shardrun::test {

namespace {

class ThreadContract : public testing::TestWithParam<int> {};

TEST_P(ThreadContract, Holds) {
  for (const ContractCase& contract : contract_cases()) {
    SCOPED_TRACE(contract.name);
    const auto on_host = [&](Communicator& communicator) {
      Host host;
      contract.body(communicator, host.place);
    };
    EXPECT_NO_THROW(run_thread_ranks(GetParam(), on_host, 120));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadContract, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace

}  // namespace shardrun::test
