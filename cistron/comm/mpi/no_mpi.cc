// A build without MPI.
#include "cistron/base/error.h"
#include "cistron/comm/mpi/mpi.h"

namespace cistron::comm::mpi {

bool IsBuilt() {
  return false;
}
std::string Describe() {
  return "not in this build";
}
int RunRank(const std::function<int(Communicator&)>&, const RunOptions&) {
  CISTRON_THROW(kUnsupported,
                "mpi: this build has no MPI transport. Install Open MPI (Debian: libopenmpi-dev "
                "openmpi-bin), configure and build again");
}

}  // namespace cistron::comm::mpi
