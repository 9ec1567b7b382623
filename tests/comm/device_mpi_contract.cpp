// The contract on virtual GPUs under mpirun: staged through MPI, all ranks on one GPU, and the virtual
// NCCL between processes.
#include <cstdio>

#include "tests/comm/device_rank.h"

namespace shardrun::test {

namespace {

void run(Communicator& world, Transport transport, uint64_t seed) {
  virtual_cuda::Settings settings;
  settings.seed = seed;
  virtual_cuda::reset(settings);
  DeviceRank rank(world, transport, 60);
  for (const ContractCase& contract : contract_cases()) {
    if (world.rank() == 0) std::fprintf(stderr, "%s %s\n", rank.comm->transport(), contract.name);
    contract.body(*rank.comm, rank.place);
    world.barrier();
  }
}

}  // namespace

}  // namespace shardrun::test

int main(int argc, char** argv) {
  using namespace shardrun;
  flush_denormals_on_this_thread();
  const std::unique_ptr<MpiSession> session = MpiSession::start(&argc, &argv);
  const std::unique_ptr<Communicator> world = session->world();
  try {
    for (uint64_t seed : {0, 5}) {
      test::run(*world, test::Transport::staged, seed);
      test::run(*world, test::Transport::nccl, seed);
    }
    SHARDRUN_CHECK(virtual_cuda::living_nccl().communicators == 0, "NCCL was not given back");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", world->rank(), error.what());
    world->abort(error.what());
    session->abort(1);
  }
  return 0;
}
