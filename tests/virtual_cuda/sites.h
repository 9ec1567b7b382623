// [Note: mutations] Which waits are there, and a program without one of them: what a suite of tests
// must notice. A wait is a barrier or a warp operation of a kernel, or a call by which the host orders
// work: waits for events and streams, questions to events, records.
//
// SHARDRUN_VIRTUAL_CUDA_SITES=FILE: each wait that this process comes by is appended to FILE, once:
//   kernel FILE:LINE
//   host EXECUTABLE CALL OFFSET OFFSET ...   (return addresses, innermost first, from where the
//                                             executable begins: addr2line knows their lines)
// SHARDRUN_VIRTUAL_CUDA_LEAVE_OUT=kernel FILE:LINE leaves that one out, by whatever kernel;
// SHARDRUN_VIRTUAL_CUDA_LEAVE_OUT=host CALL OFFSET ... does where one of the offsets is among the return
// addresses: the call does nothing and says that it worked. tests/virtual_cuda/mutations drives this.
#pragma once

#include <optional>
#include <string>

#include "tests/virtual_cuda/device.h"

namespace shardrun::virtual_cuda {

// Of a kernel, met for the first time.
void list_site(const Site& site);
// The one that the environment wants left out.
std::optional<Site> left_out_of_kernels();
// `call` orders work and comes from the host: lists where, and says whether it is left out there.
bool left_out_of_host(const char* call);

}  // namespace shardrun::virtual_cuda
