// Stands in for mpi_communicator.cpp in builds without MPI.
#include "comm/communicator.h"

namespace shardrun {

std::unique_ptr<MpiSession> MpiSession::start(int*, char***) {
  throw CommError("transport mpi: this build has no MPI; build with -DSHARDRUN_MPI=ON");
}

}  // namespace shardrun
