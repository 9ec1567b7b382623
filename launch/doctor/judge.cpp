// What is wrong with a job's ranks and nodes, as rules over their reports. Each looks at one rank,
// or at all of them, and says what to change.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include "launch/doctor/node.h"

namespace shardrun {
namespace {

constexpr int64_t kShmPerRank = int64_t{64}
                                << 20;  // NCCL's and MPI's segments; Docker gives 64 MiB in all
constexpr double kClockSeconds = 1;
constexpr double kNetworkRate =
    2e9;  // bytes/s of all ranks at once: above plain Ethernet, below any InfiniBand
constexpr int64_t kFreeBytes = int64_t{1} << 30;

class Findings {
 public:
  void wrong(const RankReport& at, const std::string& what, const std::string& change) {
    add(true, at, what, change);
  }
  void advise(const RankReport& at, const std::string& what, const std::string& change) {
    add(false, at, what, change);
  }
  std::vector<Finding> take() { return std::move(all_); }

 private:
  void add(bool wrong, const RankReport& at, const std::string& what, const std::string& change) {
    const auto known = std::ranges::find(all_, what, &Finding::what);
    if (known != all_.end()) {
      if (known->ranks.back() != at.rank) known->ranks.push_back(at.rank);
    } else {
      all_.push_back({wrong, what, change, {at.rank}});
    }
  }
  std::vector<Finding> all_;
};

// "12.4" < "13.0"; what is no version is not older.
bool is_older(const std::string& a, const std::string& b) {
  int major[2] = {}, minor[2] = {};
  if (std::sscanf(a.c_str(), "%d.%d", &major[0], &minor[0]) < 1) return false;
  if (std::sscanf(b.c_str(), "%d.%d", &major[1], &minor[1]) < 1) return false;
  return std::pair(major[0], minor[0]) < std::pair(major[1], minor[1]);
}

void judge_launcher(const RankReport& r, Findings& out) {
  if (r.launcher.empty() && r.slurm_tasks > r.size) {
    out.wrong(r,
              fmt::format("the SLURM job has {} tasks, this is one process outside of them",
                          r.slurm_tasks),
              "start it by srun --mpi=pmix, or by mpirun");
  }
  if (r.launcher == "srun" && r.pmix.empty() && r.slurm_tasks > r.size) {
    out.wrong(r, fmt::format("srun started {} tasks, MPI knows of {}", r.slurm_tasks, r.size),
              "srun --mpi=pmix");
  }
  if (r.cores > 0 && r.local_size > 0 && r.rank == 0 && r.cores < r.local_size &&
      r.launcher != "srun") {
    out.advise(r, fmt::format("{} ranks share {} cores of {}", r.local_size, r.cores, r.host),
               "fewer ranks on a node");
  }
}

// `distinct`: GPUs of this host that some rank has.
void judge_gpus(const RankReport& r, int distinct, Findings& out) {
  if (r.gpus_of_node == 0) return;
  if (!r.cuda_unavailable.empty()) {
    const bool built = r.cuda_unavailable.find("not in this build") == std::string::npos;
    const std::string what =
        fmt::format("{} has GPUs that cannot be used: {}", r.host, r.cuda_unavailable);
    if (built) {
      out.wrong(r, what,
                "a newer driver, a shardrun built with an older toolkit, or a container "
                "with its GPUs handed in");
    } else {
      out.advise(r, what, "build with CUDA, or train on the CPU");
    }
    return;
  }
  if (is_older(r.driver, r.toolkit)) {
    out.wrong(r,
              fmt::format("{}: the driver serves CUDA {}, the build is of {}", r.host, r.driver,
                          r.toolkit),
              "a newer driver, or a shardrun built with the older toolkit");
  }
  if (r.gpus_visible < distinct) {
    out.wrong(
        r,
        fmt::format("{}: ranks have {} GPUs and each sees {}: peers are hidden from NCCL", r.host,
                    distinct, r.gpus_visible),
        "ask SLURM for --gpus-per-node with --gpu-bind=none instead of --gpus-per-task, and do "
        "not set CUDA_VISIBLE_DEVICES");
  } else if (r.local_size > distinct) {
    out.wrong(
        r,
        fmt::format("{}: {} ranks share {} of its {} GPUs", r.host, r.local_size, distinct,
                    r.gpus_of_node),
        "as many ranks on a node (--ntasks-per-node, mpirun -N) as the job has GPUs there; or "
        "--comm staged");
  } else if (r.local_size < r.gpus_visible) {
    out.advise(r,
               fmt::format("{}: {} of {} GPUs have no rank", r.host, r.gpus_visible - r.local_size,
                           r.gpus_visible),
               "--ntasks-per-node (mpirun: -N) of the number of GPUs");
  }
  if (r.size > 1 && !r.nccl_unavailable.empty()) {
    out.advise(r, fmt::format("{}: no NCCL: {}", r.host, r.nccl_unavailable),
               "install NCCL or load its module; tensors go through host memory until then");
  }
}

void judge_node(const RankReport& r, Findings& out) {
  if (r.local_rank != 0) return;
  const int64_t wanted = kShmPerRank * r.local_size;
  if (r.local_size > 1 && r.shm_bytes < wanted) {
    out.wrong(r,
              fmt::format("{}: /dev/shm has {} MiB, {} ranks here want {}", r.host,
                          r.shm_bytes >> 20, r.local_size, wanted >> 20),
              "docker run --shm-size or --ipc=host; on a node, remount /dev/shm larger");
  }
  if (std::abs(r.clock_ahead) - r.clock_error > kClockSeconds) {
    out.advise(r,
               fmt::format("{}: the clock is {:.1f} s {} rank 0's", r.host, std::abs(r.clock_ahead),
                           r.clock_ahead > 0 ? "ahead of" : "behind"),
               "chrony or ntpd on that node; times in logs and names are off until then");
  }
}

void judge_network(const RankReport& r, Findings& out) {
  if (r.infiniband.empty() || r.next_is_here) return;
  for (const std::string& setting : r.without_network) {
    out.wrong(r,
              fmt::format("{}: {} keeps traffic from InfiniBand ({})", r.host, setting,
                          fmt::join(r.infiniband, ", ")),
              "unset it");
  }
  if (r.without_network.empty() && r.send_rate < kNetworkRate) {
    out.wrong(r,
              fmt::format("{}: InfiniBand ({}) is here, yet MPI sends only {:.2f} GB/s to another "
                          "node, as over TCP",
                          r.host, fmt::join(r.infiniband, ", "), r.send_rate / 1e9),
              "an MPI built with UCX: OMPI_MCA_pml=ucx, and UCX_NET_DEVICES for the adapter");
  }
}

void judge_out(const RankReport& r, Findings& out) {
  const FileSystemReport& fs = r.out;
  if (fs.path.empty()) return;
  if (!fs.error.empty()) {
    out.wrong(r, fmt::format("{}: {}", r.host, fs.error),
              "another --out, or its permissions and quota");
    return;
  }
  if (!fs.sees_first_rank) {
    out.wrong(r,
              fmt::format("{}: {} ({}) is not the folder that rank 0 writes to", r.host, fs.path,
                          fs.type),
              "an --out on a file system that all nodes share");
  }
  if (!fs.locks) {
    out.advise(r, fmt::format("{}: {} ({}) has no locks", r.host, fs.path, fs.type),
               "mount it with flock; two jobs in one OUT are told from each other by name only");
  }
  if (fs.type == "tmpfs" || fs.type == "ramfs") {
    out.advise(r, fmt::format("{}: {} lies in memory ({})", r.host, fs.path, fs.type),
               "an --out on a disk: these checkpoints go with the node");
  }
  if (fs.free_bytes < kFreeBytes) {
    out.advise(
        r, fmt::format("{}: {} has {} MiB left", r.host, fs.path, fs.free_bytes >> 20),
        "room for the checkpoints of --keep-last and one more; `shardrun plan` has the size");
  }
}

void judge_together(std::span<const RankReport> ranks, Findings& out) {
  for (const RankReport& r : ranks) {
    if (r.version != ranks[0].version) {
      out.wrong(r, fmt::format("shardrun {} here, {} on rank 0", r.version, ranks[0].version),
                "one build on all nodes");
    }
    if (r.mpi != ranks[0].mpi) {
      out.wrong(r, fmt::format("'{}' here, '{}' on rank 0", r.mpi, ranks[0].mpi),
                "the same modules on all nodes");
    }
    if (r.gpu != ranks[0].gpu) {
      out.advise(r, fmt::format("GPU '{}' here, '{}' on rank 0", r.gpu, ranks[0].gpu),
                 "one kind of GPU in a job: bits differ between kinds");
    }
  }
}

}  // namespace

std::vector<Finding> judge(std::span<const RankReport> ranks) {
  Findings out;
  std::map<std::string, std::set<std::string>> gpus;  // by host
  for (const RankReport& r : ranks) gpus[r.host].insert(r.gpu_uuid);
  for (const RankReport& r : ranks) {
    judge_launcher(r, out);
    judge_gpus(r, static_cast<int>(gpus[r.host].size()), out);
    judge_node(r, out);
    judge_network(r, out);
    judge_out(r, out);
  }
  judge_together(ranks, out);
  return out.take();
}

}  // namespace shardrun
