// What every transport promises, as functions that all ranks call and that throw where a promise is
// broken. Run over threads by thread_contract_test.cpp and under mpirun by mpi_contract.cpp.
#pragma once

#include <span>

#include "comm/communicator.h"

namespace shardrun::test {

struct ContractCase {
  const char* name;
  void (*body)(Communicator& communicator);
};

std::span<const ContractCase> contract_cases();

}  // namespace shardrun::test
