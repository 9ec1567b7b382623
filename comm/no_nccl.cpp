// Stands in for nccl_communicator.cpp in builds without NCCL.
#include "comm/communicator.h"

namespace shardrun {

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, Device&, double) {
  throw CommError("transport nccl: {}", nccl_unavailable());
}

std::string nccl_unavailable() {
  return "this build has no NCCL; build with -DSHARDRUN_NCCL=ON where nvcc and nccl.h are";
}

std::string nccl_library_version() {
  return "";
}

}  // namespace shardrun
