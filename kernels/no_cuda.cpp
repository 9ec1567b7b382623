// Stands in for kernels/cuda/ where CUDA was not built.
#include "kernels/cuda/table.h"

namespace shardrun::cuda {

const Table& table() {
  throw DeviceError("a kernel on a GPU: this build has no CUDA");
}

}  // namespace shardrun::cuda
