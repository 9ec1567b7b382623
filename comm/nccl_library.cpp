// The functions of NCCL that nccl_communicator.cpp calls, each handed on to the library, which the first
// call loads. This file is linked in place of the library. DeviceError where it is missing, or has no
// such function.
#include <nccl.h>

#include "runtime/cuda/library.h"

namespace {

template <typename Function>
Function* find(const char* name) {
  static const shardrun::cuda::Library library("libnccl.so.2");
  return reinterpret_cast<Function*>(library.function(name));
}

}  // namespace

// A function by its result, name, parameters and arguments.
#define SHARDRUN_HAND_ON(result, name, parameters, ...)        \
  result name parameters {                                     \
    static auto* const function = find<decltype(name)>(#name); \
    return function(__VA_ARGS__);                              \
  }

extern "C" {

SHARDRUN_HAND_ON(const char*, ncclGetErrorString, (ncclResult_t result), result)
SHARDRUN_HAND_ON(const char*, ncclGetLastError, (ncclComm_t comm), comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclGetVersion, (int* version), version)
SHARDRUN_HAND_ON(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), id)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommInitRankConfig,
                 (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config),
                 comm, ranks, id, rank, config)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* error), comm,
                 error)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommFinalize, (ncclComm_t comm), comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommAbort, (ncclComm_t comm), comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommRegister,
                 (const ncclComm_t comm, void* data, size_t bytes, void** handle), comm, data,
                 bytes, handle)
SHARDRUN_HAND_ON(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void* handle), comm,
                 handle)
SHARDRUN_HAND_ON(ncclResult_t, ncclRedOpCreatePreMulSum,
                 (ncclRedOp_t * op, void* scalar, ncclDataType_t type,
                  ncclScalarResidence_t residence, ncclComm_t comm),
                 op, scalar, type, residence, comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm), op, comm)
SHARDRUN_HAND_ON(ncclResult_t, ncclAllGather,
                 (const void* send, void* receive, size_t count, ncclDataType_t type,
                  ncclComm_t comm, cudaStream_t stream),
                 send, receive, count, type, comm, stream)
SHARDRUN_HAND_ON(ncclResult_t, ncclReduceScatter,
                 (const void* send, void* receive, size_t count, ncclDataType_t type,
                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
                 send, receive, count, type, op, comm, stream)
SHARDRUN_HAND_ON(ncclResult_t, ncclBroadcast,
                 (const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                  ncclComm_t comm, cudaStream_t stream),
                 send, receive, count, type, root, comm, stream)
SHARDRUN_HAND_ON(ncclResult_t, ncclSend,
                 (const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream),
                 data, count, type, peer, comm, stream)
SHARDRUN_HAND_ON(ncclResult_t, ncclRecv,
                 (void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream),
                 data, count, type, peer, comm, stream)
SHARDRUN_HAND_ON(ncclResult_t, ncclGroupStart, ())
SHARDRUN_HAND_ON(ncclResult_t, ncclGroupEnd, ())
}
