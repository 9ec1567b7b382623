// `shardrun doctor`: looks at the ranks, nodes and file system that a job would have, measures a
// little, and says what to change. 0, or 69 where something is wrong: a prologue can ask.
#include <algorithm>
#include <cstdio>
#include <set>

#include "launch/commands.h"
#include "launch/config/config.h"
#include "launch/doctor/node.h"
#include "launch/train/job.h"

namespace shardrun {
namespace {

std::vector<RankReport> gather(const RankReport& mine, Communicator& comm) {
  const std::string text =
      nlohmann::json(mine).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  int64_t longest = static_cast<int64_t>(text.size());
  comm.all_reduce_max(std::span(&longest, 1));
  std::string padded = text, all(static_cast<size_t>(longest * comm.size()), ' ');
  padded.resize(static_cast<size_t>(longest), ' ');
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)), std::as_bytes(std::span(padded)));
  std::vector<RankReport> reports;
  for (int r = 0; r < comm.size(); ++r) {
    reports.push_back(nlohmann::json::parse(
        all.substr(static_cast<size_t>(r * longest), static_cast<size_t>(longest))));
  }
  return reports;
}

std::string rate_text(double rate) {
  return bytes_text(rate) + "/s";
}

double slowest(std::span<const RankReport> ranks, double RankReport::*rate, bool here) {
  double least = 0;
  for (const RankReport& r : ranks) {
    if (r.*rate > 0 && r.next_is_here == here)
      least = least > 0 ? std::min(least, r.*rate) : r.*rate;
  }
  return least;
}

void print_node(const RankReport& r) {
  std::printf("%-12s %d rank%s, %d core%s for rank %d, /dev/shm %s, memory copy %s\n",
              r.host.c_str(), r.local_size, r.local_size == 1 ? "" : "s", r.cores,
              r.cores == 1 ? "" : "s", r.rank, bytes_text(static_cast<double>(r.shm_bytes)).c_str(),
              rate_text(r.copy_rate).c_str());
  if (!r.cuda_unavailable.empty()) {
    std::printf("  GPUs       %d; CUDA: %s\n", r.gpus_of_node, r.cuda_unavailable.c_str());
  } else {
    std::printf("  GPUs       %d, seen by a rank: %d, %s, driver %s, toolkit %s, copy %s\n",
                r.gpus_of_node, r.gpus_visible, r.gpu.c_str(), r.driver.c_str(), r.toolkit.c_str(),
                rate_text(r.gpu_copy_rate).c_str());
    std::printf("  NCCL       %s\n",
                r.nccl_unavailable.empty() ? r.nccl.c_str() : r.nccl_unavailable.c_str());
  }
  if (!r.infiniband.empty()) {
    std::printf("  InfiniBand %s\n", fmt::format("{}", fmt::join(r.infiniband, ", ")).c_str());
  }
  if (!r.out.path.empty()) {
    std::printf("  out        %s: %s, %s free, %s\n", r.out.path.c_str(), r.out.type.c_str(),
                bytes_text(static_cast<double>(r.out.free_bytes)).c_str(),
                !r.out.error.empty() ? "not usable"
                : r.out.locks        ? "writes, syncs, renames and locks work"
                                     : "writes, syncs and renames work, locks do not");
  }
}

void print(std::span<const RankReport> ranks, std::span<const Finding> findings) {
  const RankReport& first = ranks[0];
  std::set<std::string> hosts;
  for (const RankReport& r : ranks) hosts.insert(r.host);
  std::printf("shardrun     %s, %d rank%s on %zu node%s over %s\n", first.version.c_str(),
              first.size, first.size == 1 ? "" : "s", hosts.size(), hosts.size() == 1 ? "" : "s",
              first.transport.c_str());
  std::printf("launcher     %s, PMIx %s\n",
              first.launcher.empty() ? "none" : first.launcher.c_str(),
              first.pmix.empty() ? "none" : first.pmix.c_str());
  // It starts with this level or not at all.
  if (!first.mpi.empty()) std::printf("MPI          %s, MPI_THREAD_FUNNELED\n", first.mpi.c_str());
  for (const RankReport& r : ranks) {
    if (r.local_rank == 0 && hosts.erase(r.host) > 0) print_node(r);
  }
  if (first.size > 1) {
    for (const bool here : {true, false}) {
      const double rate = slowest(ranks, &RankReport::send_rate, here);
      if (rate > 0) {
        std::printf("%-12s %s to the next rank, the slowest while all send\n",
                    here ? "in a node" : "between", rate_text(rate).c_str());
      }
    }
    const auto apart = std::ranges::max_element(
        ranks, {}, [](const RankReport& r) { return std::abs(r.clock_ahead); });
    std::printf("clocks       %.6f s apart at most, give or take %.6f\n",
                std::abs(apart->clock_ahead), apart->clock_error);
  }
  for (const Finding& finding : findings) {
    std::printf("%s %s\n             change: %s\n",
                fmt::format("{:<12}", fmt::format("{} [{}]", finding.wrong ? "WRONG" : "advice",
                                                  fmt::join(finding.ranks, ",")))
                    .c_str(),
                finding.what.c_str(), finding.change.c_str());
  }
  const auto wrong = std::ranges::count_if(findings, &Finding::wrong);
  std::printf("%s\n", wrong == 0 ? "nothing is wrong" : fmt::format("wrong: {}", wrong).c_str());
}

}  // namespace

int run_doctor(const Config& given, RankContext& ranks) {
  const Config config = with_defaults(given);
  const std::vector<RankReport> reports = gather(describe_rank(config, ranks), ranks.comm);
  const std::vector<Finding> findings = judge(reports);
  const bool wrong = std::ranges::any_of(findings, &Finding::wrong);
  if (ranks.leads()) {
    if (config.json()) {
      const nlohmann::json json{{"ok", !wrong}, {"findings", findings}, {"ranks", reports}};
      std::printf("%s\n", json.dump(2).c_str());
    } else {
      print(reports, findings);
    }
  }
  return wrong ? static_cast<int>(ExitCode::unavailable) : 0;
}

}  // namespace shardrun
