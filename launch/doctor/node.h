// What `shardrun doctor` knows of a job, and what it thinks of it. probe.cpp fills a RankReport on
// each rank, doctor.cpp gathers them, judge.cpp reads all of them and nothing else, so that tests can
// describe nodes that nobody has.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "launch/ranks.h"

namespace shardrun {

struct FileSystemReport {
  std::string path;  // of --out or its nearest parent that exists; empty: not asked for
  std::string type;  // "ext4", "nfs"
  int64_t free_bytes = 0;
  std::string error;             // of making, writing, syncing or renaming; empty: all went well
  bool locks = false;            // a second lock was refused
  bool sees_first_rank = false;  // a file that rank 0 made is there
};

struct RankReport {
  std::string host;
  int rank = 0, size = 1, local_rank = 0, local_size = 1;
  std::string version;  // of shardrun

  std::string launcher;  // "mpirun", "srun", "mpiexec (PMI)"; empty: none
  std::string pmix;      // its version, or "present"; empty: none
  int slurm_tasks = 0;   // of the job around this process; 0: none
  std::string mpi;       // the library's words, first line; empty: ranks are not MPI's
  std::string transport;

  int cores = 0;             // that this process may run on
  int64_t shm_bytes = 0;     // all of /dev/shm
  double copy_rate = 0;      // bytes/s of a copy in memory, read and written
  double send_rate = 0;      // bytes/s to the next rank, all at once; 0: one rank
  bool next_is_here = true;  // the next rank is on this host
  double clock_ahead = 0;    // seconds before rank 0's clock
  double clock_error = 0;    // of that measurement, at most

  int gpus_of_node = 0;  // as the driver lists them
  int gpus_visible = 0;  // to this process
  std::string gpu, gpu_uuid, driver, toolkit;
  double gpu_copy_rate = 0;
  std::string cuda_unavailable;  // why; empty: CUDA is there
  std::string nccl, nccl_unavailable;

  std::vector<std::string> infiniband;       // adapters
  std::vector<std::string> without_network;  // settings that keep MPI or NCCL from using them

  FileSystemReport out;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FileSystemReport, path, type, free_bytes, error, locks,
                                   sees_first_rank)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankReport, host, rank, size, local_rank, local_size, version,
                                   launcher, pmix, slurm_tasks, mpi, transport, cores, shm_bytes,
                                   copy_rate, send_rate, next_is_here, clock_ahead, clock_error,
                                   gpus_of_node, gpus_visible, gpu, gpu_uuid, driver, toolkit,
                                   gpu_copy_rate, cuda_unavailable, nccl, nccl_unavailable,
                                   infiniband, without_network, out)

struct Finding {
  bool wrong = true;         // the job should not start; else it will only be slower than need be
  std::string what, change;  // what was found, and what to do
  std::vector<int> ranks;    // where
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Finding, wrong, what, change, ranks)

// In order of rank; what several ranks share is one finding.
std::vector<Finding> judge(std::span<const RankReport> ranks);

// Who started this process, by the variables that it left; lookup is std::getenv.
void describe_launcher(const std::function<const char*(const char*)>& lookup, RankReport& report);
// Fills the file system's part for the folder `out`. Ranks call it in the same order.
FileSystemReport describe_file_system(const std::string& out, Communicator& comm,
                                      bool first_of_node);
// All of this rank. Collective.
RankReport describe_rank(const Config& config, RankContext& ranks);

}  // namespace shardrun
