// What every transport promises, as functions that all ranks call and that throw where a promise is
// broken: over threads by thread_contract_test.cpp, under mpirun by mpi_contract.cpp, on virtual GPUs
// by device_contract_test.cpp and device_mpi_contract.cpp.
#pragma once

#include <span>

#include "comm/communicator.h"

namespace shardrun::test {

// Where a rank's tensors are: its stream and its memory.
struct Place {
  Stream& stream;
  Memory& memory;
};

// Host memory.
struct Host {
  ThreadPool pool{1};
  Stream stream{DeviceKind::cpu, Isa::baseline, &pool};
  std::unique_ptr<Memory> memory = make_heap_memory();
  Place place{stream, *memory};
};

struct ContractCase {
  const char* name;
  void (*body)(Communicator& communicator, Place& place);
};

std::span<const ContractCase> contract_cases();

}  // namespace shardrun::test
