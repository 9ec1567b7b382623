// Looks at this rank's process, node and neighbours for `shardrun doctor`. Sends and copies a
// little, writes one folder below --out and removes it.
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "launch/bench/timing.h"
#include "launch/doctor/node.h"
#include "launch/train/environment.h"

namespace shardrun {
namespace {

namespace fs = std::filesystem;
using Steady = std::chrono::steady_clock;

constexpr size_t kCopyBytes = size_t{32} << 20;
constexpr size_t kSendBytes = size_t{8} << 20;
constexpr int kRounds = 9;

double seconds_since(Steady::time_point begin) {
  return std::chrono::duration<double>(Steady::now() - begin).count();
}

std::vector<std::string> entries(const char* folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

std::string type_of(const std::string& path) {
  struct statfs info;
  if (::statfs(path.c_str(), &info) != 0) return "unknown";
  // The magic numbers of linux/magic.h and of the cluster file systems that are not in it.
  switch (static_cast<uint32_t>(info.f_type)) {
    case 0xef53:
      return "ext4";
    case 0x58465342:
      return "xfs";
    case 0x9123683e:
      return "btrfs";
    case 0x2fc12fc1:
      return "zfs";
    case 0x01021994:
      return "tmpfs";
    case 0x858458f6:
      return "ramfs";
    case 0x794c7630:
      return "overlay";
    case 0x6969:
      return "nfs";
    case 0xff534d42:
      return "cifs";
    case 0x0bd00bd0:
      return "lustre";
    case 0x47504653:
      return "gpfs";
    case 0x19830326:
      return "beegfs";
    case 0x00c36400:
      return "ceph";
    case 0x65735546:
      return "fuse";
    default:
      return fmt::format("type {:#x}", static_cast<uint32_t>(info.f_type));
  }
}

// Bytes/s that this rank sends to the next while all others do the same.
double send_rate(Communicator& comm) {
  if (comm.size() == 1) return 0;
  const std::vector<std::byte> mine(kSendBytes, std::byte(comm.rank()));
  std::vector<std::byte> from(kSendBytes);
  std::vector<double> rounds;
  for (int i = 0; i < kRounds; ++i) {
    comm.barrier();
    const auto begin = Steady::now();
    comm.shift_bytes(from, mine, 1);
    rounds.push_back(seconds_since(begin));
  }
  return static_cast<double>(kSendBytes) / median(rounds);
}

// What this clock is ahead of rank 0's, which is read after this rank came to the barrier and
// before this rank has heard of it: the shortest such time bounds the error.
void compare_clocks(Communicator& comm, RankReport& report) {
  report.clock_error = 1e9;
  for (int i = 0; i < kRounds; ++i) {
    const auto begin = Steady::now();
    comm.barrier();
    const double now =
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    std::vector<double> all(static_cast<size_t>(comm.size()));
    comm.all_gather_bytes(std::as_writable_bytes(std::span(all)),
                          std::as_bytes(std::span(&now, 1)));
    const double took = seconds_since(begin);
    if (took < report.clock_error) {
      report.clock_error = took;
      report.clock_ahead = now - all[0];
    }
  }
}

void describe_gpu(const RankContext& ranks, RankReport& report) {
  report.gpus_of_node = static_cast<int>(entries("/proc/driver/nvidia/gpus").size());
  report.cuda_unavailable = cuda_unavailable();
  report.nccl_unavailable = nccl_unavailable();
  report.nccl = nccl_library_version();
  report.gpus_visible = report.cuda_unavailable.empty() ? cuda_device_count() : 0;
  if (report.gpus_visible == 0) return;
  const auto device = make_cuda_device(ranks.local_rank % report.gpus_visible);
  const DeviceInfo& info = device->info();
  report.gpu = info.name;
  report.gpu_uuid = info.uuid;
  report.driver = info.driver;
  report.toolkit = info.toolkit;
  Stream stream(*device, 0, Priority::compute);
  const auto memory = make_heap_memory(device.get());
  report.gpu_copy_rate = copy_bandwidth(kCopyBytes, *memory, stream);
}

void describe_node(RankReport& report) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) report.cores = CPU_COUNT(&cores);
  struct statvfs shm;
  if (::statvfs("/dev/shm", &shm) == 0) {
    report.shm_bytes = static_cast<int64_t>(shm.f_blocks) * static_cast<int64_t>(shm.f_frsize);
  }
  report.infiniband = entries("/sys/class/infiniband");
  for (const auto& [name, bad] : {std::pair<const char*, const char*>{"NCCL_IB_DISABLE", "1"},
                                  {"NCCL_NET", "Socket"},
                                  {"OMPI_MCA_pml", "ob1"},
                                  {"UCX_TLS", "tcp"}}) {
    const char* value = std::getenv(name);
    if (value && std::string_view(value) == bad) {
      report.without_network.push_back(fmt::format("{}={}", name, bad));
    }
  }
}

// Writes, syncs, renames and locks in a folder of its own, as a checkpoint does.
void try_out(const fs::path& folder, FileSystemReport& report) {
  const auto fail = [&](const char* what) {
    report.error =
        fmt::format("{}: {}: {}", folder.parent_path().string(), what, std::strerror(errno));
  };
  if (::mkdir(folder.c_str(), 0777) != 0) return fail("cannot make a folder");
  const std::string before = folder / "before", after = folder / "after";
  const int file = ::open(before.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return fail("cannot make a file");
  const std::string text(size_t{1} << 16, 'x');
  if (::write(file, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    fail("cannot write");
  } else if (::fsync(file) != 0) {
    fail("cannot sync a file");
  } else if (::rename(before.c_str(), after.c_str()) != 0) {
    fail("cannot rename");
  } else {
    const int parent = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0 || ::fsync(parent) != 0) fail("cannot sync a folder");
    if (parent >= 0) ::close(parent);
    const int other = ::open(after.c_str(), O_RDWR | O_CLOEXEC);
    report.locks = ::flock(file, LOCK_EX | LOCK_NB) == 0 && other >= 0 &&
                   ::flock(other, LOCK_EX | LOCK_NB) != 0;
    if (other >= 0) ::close(other);
  }
  ::close(file);
}

}  // namespace

void describe_launcher(const std::function<const char*(const char*)>& lookup, RankReport& report) {
  const auto number = [&](const char* name) { return lookup(name) ? std::atoi(lookup(name)) : 0; };
  const bool step = lookup("SLURM_STEP_ID") && lookup("SLURM_PROCID");
  report.slurm_tasks = std::max(step ? number("SLURM_STEP_NUM_TASKS") : 0, number("SLURM_NTASKS"));
  if (lookup("OMPI_COMM_WORLD_SIZE")) {
    report.launcher = "mpirun";
    report.slurm_tasks = 0;  // mpirun's own daemons are tasks, its ranks are not
  } else if (step) {
    report.launcher = "srun";
  } else if (lookup("PMI_RANK")) {
    report.launcher = "mpiexec (PMI)";
  }
  if (lookup("PMIX_RANK"))
    report.pmix = lookup("PMIX_VERSION") ? lookup("PMIX_VERSION") : "present";
}

FileSystemReport describe_file_system(const std::string& out, Communicator& comm,
                                      bool first_of_node) {
  FileSystemReport report;
  if (out.empty()) return report;
  std::error_code error;
  fs::path place = fs::absolute(out, error);
  while (!place.empty() && place != place.root_path() && !fs::exists(place, error)) {
    place = place.parent_path();
  }
  report.path = place.string();
  report.type = type_of(report.path);
  struct statvfs space;
  if (::statvfs(place.c_str(), &space) == 0) {
    report.free_bytes = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  }
  // One name for all ranks, which none can guess before.
  uint64_t name = 0;
  if (comm.rank() == 0) name = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  comm.broadcast(std::as_writable_bytes(std::span(&name, 1)), 0);
  const auto folder = [&](int rank) {
    return place / fmt::format(".doctor-{:016x}-{}", name, rank);
  };
  if (first_of_node) try_out(folder(comm.rank()), report);
  comm.barrier();
  // What the first rank could not make is missed nowhere.
  int64_t made = comm.rank() == 0 ? report.error.empty() : 0;
  comm.broadcast(std::as_writable_bytes(std::span(&made, 1)), 0);
  report.sees_first_rank = made == 0 || fs::exists(folder(0) / "after", error);
  if (!first_of_node) report.locks = true;  // its node's first rank tells
  comm.barrier();
  fs::remove_all(folder(comm.rank()), error);
  return report;
}

RankReport describe_rank(const Config& config, RankContext& ranks) {
  RankReport report;
  Communicator& comm = ranks.comm;
  report.host = host_name();
  report.rank = comm.rank();
  report.size = comm.size();
  report.local_rank = ranks.local_rank;
  report.local_size = ranks.local_size;
  report.version = version();
  report.mpi = ranks.transport_version.substr(0, ranks.transport_version.find_first_of(",\n"));
  report.transport = comm.transport();
  describe_launcher([](const char* name) -> const char* { return std::getenv(name); }, report);
  describe_node(report);
  describe_gpu(ranks, report);

  ThreadPool pool(config.threads() > 0 ? static_cast<int>(config.threads())
                                       : std::max(1, report.cores / std::max(1, ranks.local_size)));
  Stream stream(DeviceKind::cpu, detect_isa(), &pool);
  const auto memory = make_heap_memory();
  comm.barrier();  // all at once, as in training
  report.copy_rate = copy_bandwidth(kCopyBytes, *memory, stream);
  report.send_rate = send_rate(comm);
  compare_clocks(comm, report);

  uint64_t host = std::hash<std::string>{}(report.host), next = 0;
  if (comm.size() > 1) {
    comm.shift_bytes(std::as_writable_bytes(std::span(&next, 1)),
                     std::as_bytes(std::span(&host, 1)), comm.size() - 1);
    report.next_is_here = next == host;
  }
  report.out = describe_file_system(config.out(), comm, ranks.local_rank == 0);
  return report;
}

}  // namespace shardrun
