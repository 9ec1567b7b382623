#include "runtime/cuda/library.h"

#include <dlfcn.h>

#include "runtime/error.h"

namespace shardrun::cuda {

Library::Library(const char* file) : file_(file), handle_(dlopen(file, RTLD_LAZY | RTLD_LOCAL)) {
  if (handle_) return;
  const std::string reason = dlerror();
  handle_ =
      dlopen((SHARDRUN_CUDA_LIBRARIES "/" + std::string(file)).c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle_) return;
  throw DeviceError("{}; nor is it in " SHARDRUN_CUDA_LIBRARIES
                    ": put the folder that has it into LD_LIBRARY_PATH",
                    reason);
}

void* Library::function(const char* name) const {
  void* found = dlsym(handle_, name);
  if (!found) throw DeviceError("{}: has no {}; is it of an older toolkit?", file_, name);
  return found;
}

}  // namespace shardrun::cuda
