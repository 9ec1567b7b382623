// From a command line to ranks: finds out who launched this process, makes the communicator, runs the
// body on each rank, and turns errors into one message and one exit code.
#pragma once

#include <optional>
#include <string>

#include "comm/communicator.h"
#include "launch/config/config.h"
#include "runtime/error.h"
#include "runtime/thread_pool.h"

namespace shardrun {

struct RankContext {
  Communicator& comm;
  int local_rank = 0;  // among the ranks of this node
  int local_size = 1;
  std::string transport_version;  // of the MPI library, empty for threads

  bool leads() const { return comm.rank() == 0; }
};

// Runs `body` on every rank that this process holds: one under mpirun or srun, N for --comm thread:N.
// Returns the exit code of the process. An Error thrown by a rank is printed once, as
// `[rank 3/8 host] message`, and ends all ranks. `refused` is what is wrong with this process's command
// line, if anything: the body is not run then. It comes here because launchers end all ranks at the
// first exit with a code; the ranks hear of it, one prints, and they leave together.
int run_on_ranks(const Config& config, std::optional<Error> refused, int* argc, char*** argv,
                 FunctionRef<int(RankContext&)> body);

// An error that every rank knows of: all leave in order, the lowest failing rank has the message.
class AgreedError : public Error {
 public:
  AgreedError(ExitCode code, const std::string& message, bool prints)
      : Error(code, message), prints_(prints) {}
  bool prints() const { return prints_; }

 private:
  bool prints_;
};

// Runs `action` on every rank; when it throws on some, every rank throws an AgreedError. Collective: use
// it where ranks may fail alone (files, memory) and all must leave together.
void agree(Communicator& comm, FunctionRef<void()> action);

// Throws ConfigError on every rank, naming the first that differs, unless `value` is the same everywhere.
void require_equal(Communicator& comm, const std::string& what, const std::string& value);

std::string host_name();

}  // namespace shardrun
