// What tests set and read of the virtual NCCL (nccl.cpp).
//
// Ranks may be threads of one process or processes of one machine: they meet in memory that they
// share. What a rank is given is queued on its virtual stream (runtime.h) and runs when the partners'
// does. Ranks must agree on call, count, type, root and order; where two do not, both devices break
// with a text that names both calls. Two ranks on one GPU, a second call while the first is "in
// progress", memory outside of an allocation and operators of another communicator are refused, as the
// real library does or should. Every third call answers "in progress" first.
//
// Calls on a stream fail by virtual_cuda::fail("ncclAllGather", ...), too.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>

namespace shardrun::virtual_cuda {

// The n-th call of `function` from now on, from 1, of `rank` (-1: each) answers with `error`.
void fail_nccl(const std::string& function, int64_t n, ncclResult_t error, int rank = -1);
// Communicators and registered buffers of this process that nobody has given back; forgets faults.
struct LivingNccl {
  int64_t communicators = 0, buffers = 0, operators = 0;
  int64_t aborted = 0;  // since the last reset
};
LivingNccl living_nccl();
void reset_nccl();

}  // namespace shardrun::virtual_cuda
