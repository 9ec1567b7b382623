// A library of the toolkit that is loaded when it is first needed. cuBLASLt and NCCL are hundreds of
// megabytes: linked in the ordinary way they cost every start of the program 0.4 s, also on CPUs.
#pragma once

namespace shardrun::cuda {

class Library {
 public:
  // `file` as in "libcublasLt.so.13": looked for where the system looks (LD_LIBRARY_PATH), then in
  // the folder of the toolkit that this build was made with. DeviceError with the loader's reason.
  explicit Library(const char* file);
  Library(const Library&) = delete;

  void* function(const char* name) const;  // DeviceError when it is not there

 private:
  const char* file_;
  void* handle_;  // stays open until the process ends: streams keep objects of it
};

}  // namespace shardrun::cuda
