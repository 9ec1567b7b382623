// What the doctor says of nodes that are described here: a good one has no finding, and each thing
// that is made bad has its own, of the right weight, with the right remedy.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "comm/communicator.h"
#include "launch/doctor/node.h"

namespace shardrun {
namespace {

// Two nodes with four GPUs and four ranks each, all well.
std::vector<RankReport> good_job() {
  std::vector<RankReport> ranks(8);
  for (int i = 0; i < 8; ++i) {
    RankReport& r = ranks[static_cast<size_t>(i)];
    r.host = i < 4 ? "a" : "b";
    r.rank = i;
    r.size = 8;
    r.local_rank = i % 4;
    r.local_size = 4;
    r.version = "0.1.0";
    r.launcher = "srun";
    r.pmix = "4.2.2";
    r.slurm_tasks = 8;
    r.mpi = "Open MPI v4.1.4";
    r.transport = "mpi";
    r.cores = 8;
    r.shm_bytes = int64_t{100} << 30;
    r.copy_rate = 1e10;
    r.send_rate = 1e10;
    r.next_is_here = i % 4 != 3;
    r.gpus_of_node = r.gpus_visible = 4;
    r.gpu = "NVIDIA H100";
    r.gpu_uuid = r.host + std::to_string(r.local_rank);
    r.driver = r.toolkit = "12.4";
    r.nccl = "2.28";
    r.infiniband = {"mlx5_0"};
    r.out = {"/scratch/out", "lustre", int64_t{1} << 40, "", true, true};
  }
  return ranks;
}

struct Case {
  const char* name;
  void (*spoil)(RankReport&);
  bool wrong;
  const char* what;
  const char* change;
};

const Case kCases[] = {
    {"hidden peers", [](RankReport& r) { r.gpus_visible = 1; }, true, "hidden from NCCL",
     "--gpu-bind=none"},
    {"one GPU for all",
     [](RankReport& r) {
       r.gpus_visible = 1;
       r.gpu_uuid = r.host;
     },
     true, "4 ranks share 1 of its 4 GPUs", "--comm staged"},
    {"idle GPUs", [](RankReport& r) { r.gpus_of_node = r.gpus_visible = 8; }, false,
     "4 of 8 GPUs have no rank", "--ntasks-per-node"},
    {"old driver", [](RankReport& r) { r.toolkit = "13.0"; }, true, "driver serves CUDA 12.4",
     "newer driver"},
    {"no driver", [](RankReport& r) { r.cuda_unavailable = "driver version is insufficient"; },
     true, "cannot be used: driver version", "newer driver"},
    {"CUDA left out", [](RankReport& r) { r.cuda_unavailable = "not in this build"; }, false,
     "not in this build", "build with CUDA"},
    {"no NCCL", [](RankReport& r) { r.nccl_unavailable = "no libnccl.so.2"; }, false,
     "no libnccl.so.2", "install NCCL"},
    {"small shm", [](RankReport& r) { r.shm_bytes = int64_t{64} << 20; }, true,
     "/dev/shm has 64 MiB, 4 ranks here want 256", "--shm-size"},
    {"clock ahead", [](RankReport& r) { r.clock_ahead = r.rank < 4 ? 0 : 7; }, false,
     "7.0 s ahead of rank 0's", "chrony"},
    {"TCP", [](RankReport& r) { r.send_rate = 1.1e9; }, true, "sends only 1.10 GB/s", "pml=ucx"},
    {"InfiniBand off", [](RankReport& r) { r.without_network = {"NCCL_IB_DISABLE=1"}; }, true,
     "NCCL_IB_DISABLE=1 keeps", "unset"},
    {"outside of the tasks",
     [](RankReport& r) {
       r.launcher = r.pmix = "";
       r.slurm_tasks = 16;
     },
     true, "the SLURM job has 16 tasks", "srun --mpi=pmix"},
    {"srun without PMIx",
     [](RankReport& r) {
       r.pmix = "";
       r.slurm_tasks = 16;
     },
     true, "srun started 16 tasks, MPI knows of 8", "srun --mpi=pmix"},
    {"few cores",
     [](RankReport& r) {
       r.cores = 2;
       r.launcher = "mpirun";
     },
     false, "4 ranks share 2 cores", "fewer ranks"},
    {"another build", [](RankReport& r) { r.version = r.rank < 4 ? "0.1.0" : "0.2.0"; }, true,
     "shardrun 0.2.0 here, 0.1.0 on rank 0", "one build"},
    {"another MPI",
     [](RankReport& r) {
       if (r.rank > 5) r.mpi = "MPICH";
     },
     true, "'MPICH' here", "modules"},
    {"other GPUs",
     [](RankReport& r) {
       if (r.host == "b") r.gpu = "NVIDIA A100";
     },
     false, "GPU 'NVIDIA A100' here", "one kind"},
    {"no folder", [](RankReport& r) { r.out.error = "/scratch/out: cannot write: Quota exceeded"; },
     true, "Quota exceeded", "another --out"},
    {"not shared",
     [](RankReport& r) {
       if (r.host == "b") r.out.sees_first_rank = false;
     },
     true, "not the folder that rank 0 writes to", "share"},
    {"no locks", [](RankReport& r) { r.out.locks = false; }, false, "has no locks", "flock"},
    {"in memory", [](RankReport& r) { r.out.type = "tmpfs"; }, false, "lies in memory",
     "on a disk"},
    {"full", [](RankReport& r) { r.out.free_bytes = int64_t{5} << 20; }, false, "5 MiB left",
     "room for"},
};

TEST(Doctor, AGoodJobHasNoFinding) {
  EXPECT_EQ(nlohmann::json(judge(good_job())).dump(), "[]");
}

TEST(Doctor, EachBadThingHasItsFinding) {
  for (const Case& each : kCases) {
    SCOPED_TRACE(each.name);
    std::vector<RankReport> ranks = good_job();
    for (RankReport& r : ranks) each.spoil(r);
    const std::vector<Finding> findings = judge(ranks);
    ASSERT_FALSE(findings.empty());
    for (const Finding& finding : findings) {  // one for each host at most, and nothing else
      EXPECT_EQ(finding.wrong, each.wrong) << finding.what;
      EXPECT_NE(finding.what.find(each.what), std::string::npos) << finding.what;
      EXPECT_NE(finding.change.find(each.change), std::string::npos) << finding.change;
      EXPECT_FALSE(finding.ranks.empty());
    }
    EXPECT_LE(findings.size(), 2U);
  }
}

TEST(Doctor, NamesTheRanks) {
  std::vector<RankReport> ranks = good_job();
  for (const size_t bad : {5, 7}) ranks[bad].mpi = "MPICH";
  const auto findings = judge(ranks);
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].ranks, (std::vector<int>{5, 7}));
}

TEST(Doctor, KnowsLaunchersByWhatTheyLeave) {
  using Variables = std::map<std::string, const char*>;
  const auto describe = [](const Variables& variables) {
    RankReport report;
    describe_launcher(
        [&](const char* name) {
          const auto found = variables.find(name);
          return found == variables.end() ? nullptr : found->second;
        },
        report);
    return fmt::format("{}/{}/{}", report.launcher, report.pmix, report.slurm_tasks);
  };
  EXPECT_EQ(describe({}), "//0");
  EXPECT_EQ(describe({{"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_RANK", "0"}, {"SLURM_NTASKS", "8"}}),
            "mpirun/present/0");
  EXPECT_EQ(describe({{"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "1"},
                      {"SLURM_STEP_NUM_TASKS", "4"},
                      {"PMIX_RANK", "1"},
                      {"PMIX_VERSION", "4.2.2"}}),
            "srun/4.2.2/4");
  EXPECT_EQ(describe({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}),
            "//8");  // in the batch script
  EXPECT_EQ(describe({{"PMI_RANK", "0"}}), "mpiexec (PMI)//0");
}

TEST(Doctor, TriesTheFileSystemAndLeavesNothing) {
  const auto folder = std::filesystem::path(testing::TempDir()) / "doctor";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  run_thread_ranks(3, [&](Communicator& comm) {
    const auto report = describe_file_system(folder / "not/yet", comm, comm.rank() == 0);
    EXPECT_EQ(report.path, folder.string());
    EXPECT_EQ(report.error, "");
    EXPECT_TRUE(report.locks);
    EXPECT_TRUE(report.sees_first_rank);
    EXPECT_GT(report.free_bytes, 0);
    EXPECT_EQ(describe_file_system("", comm, true).path, "");
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder));

  // Two nodes with a folder each, under one name.
  for (const char* node : {"a", "b"}) std::filesystem::create_directories(folder / node);
  run_thread_ranks(2, [&](Communicator& comm) {
    const auto report = describe_file_system(folder / (comm.rank() == 0 ? "a" : "b"), comm, true);
    EXPECT_EQ(report.sees_first_rank, comm.rank() == 0);
  });

  run_thread_ranks(2, [&](Communicator& comm) {  // root may write everywhere but here
    const auto report = describe_file_system("/proc/1/nowhere", comm, comm.rank() == 0);
    EXPECT_EQ(report.error.find("cannot make a folder") != std::string::npos, comm.rank() == 0);
    EXPECT_TRUE(report.sees_first_rank);
  });
}

}  // namespace
}  // namespace shardrun
