#include "launch/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "launch/signals.h"
#include "runtime/random.h"
#include "runtime/signals.h"

namespace shardrun {

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

static int environment_number(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : fallback;
}

// srun without a plugin gives its tasks nothing by which an MPI could find the others.
static bool srun_without_pmix() {
  if (!std::getenv("SLURM_STEP_ID") || !std::getenv("SLURM_PROCID")) return false;
  for (const char* name : {"PMIX_RANK", "PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK"}) {
    if (std::getenv(name)) return false;
  }
  return true;
}

// What the launcher says about the number of processes; 0 when nothing launched this one.
static int launched_size() {
  int size = 0;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"}) {
    size = std::max(size, environment_number(name, 0));
  }
  if (std::getenv("SLURM_STEP_ID") && std::getenv("SLURM_PROCID")) {
    size = std::max(size, environment_number("SLURM_STEP_NUM_TASKS",
                                             environment_number("SLURM_NTASKS", 1)));
    if (size == 1 && srun_without_pmix()) return 0;  // needs no MPI, and MPI would not start
  }
  if (std::getenv("PMIX_RANK")) size = std::max(size, 1);
  return size;
}

static void print_error(const Error& error, int rank, int size) {
  std::fflush(stdout);
  if (size > 1) {
    std::fprintf(stderr, "[rank %d/%d %s] %s\n", rank, size, host_name().c_str(), error.what());
  } else {
    std::fprintf(stderr, "shardrun: %s\n", error.what());
  }
  std::fflush(stderr);
}

// A standard exception is a bug or a lack of memory: it becomes one of our errors.
static Error as_error(const std::exception& exception) {
  if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
  if (dynamic_cast<const std::bad_alloc*>(&exception)) {
    return DeviceError("out of host memory; use more ranks, a higher --zero or a smaller --micro-batch");
  }
  return InternalError("{}", exception.what());
}

void agree(Communicator& comm, FunctionRef<void()> action) {
  std::optional<Error> mine;
  try {
    action();
  } catch (const std::exception& exception) {
    mine = as_error(exception);
  }
  const int32_t code = mine ? static_cast<int32_t>(mine->code()) : 0;
  std::vector<int32_t> codes(comm.size());
  comm.all_gather_bytes(std::as_writable_bytes(std::span(codes)),
                        std::as_bytes(std::span(&code, 1)));
  for (int r = 0; r < comm.size(); ++r) {
    if (codes[r] == 0) continue;
    const bool prints = r == comm.rank();
    throw AgreedError(static_cast<ExitCode>(codes[r]), prints ? mine->what() : "another rank failed",
                      prints);
  }
}

void require_equal(Communicator& comm, const std::string& what, const std::string& value) {
  uint64_t mine = hash_name(value);
  std::vector<uint64_t> all(comm.size());
  comm.all_gather_bytes(std::as_writable_bytes(std::span(all)),
                        std::as_bytes(std::span(&mine, 1)));
  int other = 0;
  while (other < comm.size() && all[other] == all[0]) ++other;
  if (other == comm.size()) return;
  agree(comm, [&] {
    if (comm.rank() == other) {
      throw ConfigError("{} differs between ranks: here '{}', rank 0 has another; start all ranks with "
                        "the same command, files and build",
                        what, value);
    }
  });
}

static int leave(const Error& error, int rank, int size) {
  print_error(error, rank, size);
  return static_cast<int>(error.code());
}

static int run_threads(int size, FunctionRef<int(RankContext&)> body) {
  // The first error is the cause and the one that is printed.
  std::mutex mutex;
  int exit_code = 0;
  try {
    run_thread_ranks(size, [&](Communicator& comm) {
      RankContext context{comm, comm.rank(), comm.size(), ""};
      try {
        const int code = body(context);
        std::lock_guard lock(mutex);
        exit_code = std::max(exit_code, code);
      } catch (const CommError&) {
        throw;
      } catch (const std::exception& exception) {
        const Error error = as_error(exception);
        const auto* agreed = dynamic_cast<const AgreedError*>(&exception);
        std::lock_guard lock(mutex);
        if (agreed ? agreed->prints() : exit_code == 0) print_error(error, comm.rank(), comm.size());
        exit_code = static_cast<int>(error.code());
        throw;
      }
    });
  } catch (const std::exception& exception) {
    if (exit_code == 0) exit_code = leave(as_error(exception), 0, size);
  }
  return exit_code;
}

// The first process tells, all leave.
static int refuse_singletons(int launched) {
  if (environment_number("SLURM_PROCID", environment_number("PMI_RANK", 0)) == 0) {
    std::fprintf(stderr,
                 "shardrun: the launcher started %d processes, but MPI says that each is alone; "
                 "use srun --mpi=pmix, or the mpirun of the MPI that shardrun was built with\n",
                 launched);
  }
  return static_cast<int>(ExitCode::unavailable);
}

static int run_mpi(int* argc, char*** argv, int launched, FunctionRef<int(RankContext&)> body) {
  // Open MPI would end each with a page of its own.
  if (launched > 1 && srun_without_pmix()) return refuse_singletons(launched);
  std::unique_ptr<MpiSession> session = MpiSession::start(argc, argv);
  std::unique_ptr<Communicator> world = session->world();
  if (world->size() == 1 && launched > 1) return refuse_singletons(launched);
  RankContext context{*world, session->local_rank(), session->local_size(),
                      session->library_version()};
  try {
    const BlockSignals blocked;  // [Note: signals]
    const int code = body(context);
    world->barrier();  // the first exit with a code ends the others: leave together
    return code;
  } catch (const AgreedError& error) {
    if (error.prints()) print_error(error, world->rank(), world->size());
    world->barrier();  // everyone is here
    return static_cast<int>(error.code());
  } catch (const std::exception& exception) {
    const Error error = as_error(exception);
    // Ranks often meet the same trouble at once. The lowest speaks and its abort ends the others,
    // which wait for that before they speak themselves. The launcher ends ranks by SIGTERM, which
    // training takes for a request to save.
    let_signals_end_process();
    std::this_thread::sleep_for(std::chrono::milliseconds(200) * std::min(world->rank(), 10));
    print_error(error, world->rank(), world->size());
    // Alone in its trouble or not, this rank cannot know: abort ends the ranks that still wait.
    world->abort(error.what());
    session->abort(static_cast<int>(error.code()));
  }
  __builtin_unreachable();  // abort does not come back
}

int run_on_ranks(const Config& config, std::optional<Error> refused, int* argc, char*** argv,
                 FunctionRef<int(RankContext&)> body) {
  const std::string transport = config.comm();
  const int launched = launched_size();
  const bool threads = transport.starts_with("thread:");
  if (!refused && threads && launched > 1) {
    refused = ConfigError("--comm {}: {} processes were launched; thread ranks live in one",
                          transport, launched);
  }
  const bool of_gpus = transport == "nccl" || transport == "staged";
  if (!refused && transport == "nccl" && !nccl_unavailable().empty()) {
    refused = DeviceError("--comm nccl: {}", nccl_unavailable());
  }
  if (!refused && !threads && !of_gpus && transport != "auto" && transport != "mpi") {
    refused = UsageError(
        "--comm: got '{}', wanted auto, thread:N, mpi, nccl or staged (shm is not in this build)",
        transport);
  }
  try {
    take_signals();
    if (refused && launched <= 1) throw *refused;
    if (refused || transport == "mpi" || ((transport == "auto" || of_gpus) && launched > 0)) {
      return run_mpi(argc, argv, launched, [&](RankContext& ranks) {
        agree(ranks.comm, [&] {
          if (refused) throw *refused;
        });
        return body(ranks);
      });
    }
    return run_threads(threads ? std::atoi(transport.c_str() + 7) : 1, body);
  } catch (const std::exception& exception) {
    return leave(as_error(exception), 0, 1);
  }
}

}  // namespace shardrun
