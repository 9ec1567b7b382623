// A rank with a virtual GPU: all of its own, or one that all ranks share.
#pragma once

#include "tests/comm/contract.h"
#include "tests/virtual_cuda/nccl.h"
#include "tests/virtual_cuda/runtime.h"

namespace shardrun::test {

enum class Transport { staged, nccl };

// Destroyed from the last to the first, as a rank has to: NCCL before the memory that it may read.
struct DeviceRank {
  DeviceRank(Communicator& host, Transport transport, double deadline_seconds)
      : DeviceRank(host, transport, deadline_seconds,
                   transport == Transport::staged ? 0 : host.rank()) {}
  DeviceRank(Communicator& host, Transport transport, double deadline_seconds, int gpu)
      : device(make_cuda_device(gpu)),
        stream(*device, 1 << 20, Priority::communication),
        memory(make_heap_memory(device.get())),
        comm(transport == Transport::staged
                 ? make_staged_communicator(host, *device)
                 : make_nccl_communicator(host, *device, deadline_seconds)),
        place{stream, *memory} {}

  std::unique_ptr<Device> device;
  Stream stream;
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Communicator> comm;
  Place place;
};

}  // namespace shardrun::test
