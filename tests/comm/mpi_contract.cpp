// The contract under mpirun. With --fail rank 1 throws while the others wait: the job must end.
#include <cstdio>
#include <cstring>

#include "tests/comm/contract.h"

namespace shardrun::test {

namespace {

void run(Communicator& world, bool fail) {
  if (fail) {
    if (world.rank() == 1) throw InternalError("planned failure");
    world.barrier();
  }
  for (const ContractCase& contract : contract_cases()) {
    if (world.rank() == 0) std::fprintf(stderr, "%s\n", contract.name);
    Host host;
    contract.body(world, host.place);
    world.barrier();
  }
  // An aborted communicator throws from then on, without waiting for anybody.
  world.abort("enough");
  try {
    world.barrier();
  } catch (const CommError& error) {
    SHARDRUN_CHECK(std::strcmp(error.what(), "enough") == 0, "message \"{}\"", error.what());
    return;
  }
  SHARDRUN_CHECK(false, "a barrier after abort was let through");
}

}  // namespace

}  // namespace shardrun::test

int main(int argc, char** argv) {
  using namespace shardrun;
  flush_denormals_on_this_thread();
  const std::unique_ptr<MpiSession> session = MpiSession::start(&argc, &argv);
  const std::unique_ptr<Communicator> world = session->world();
  try {
    SHARDRUN_CHECK(session->local_size() == world->size(), "{} of {} ranks on this node",
                   session->local_size(), world->size());
    SHARDRUN_CHECK(session->local_rank() == world->rank(), "rank {} is {} on this node",
                   world->rank(), session->local_rank());
    SHARDRUN_CHECK(!session->library_version().empty(), "the library has no version");
    test::run(*world, argc > 1 && std::strcmp(argv[1], "--fail") == 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", world->rank(), error.what());
    world->abort(error.what());
    session->abort(1);
  }
  return 0;
}
