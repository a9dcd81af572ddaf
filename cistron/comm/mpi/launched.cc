// What launchers leave in the environment. Needs no MPI: a build without it must see them too.
#include "cistron/base/env.h"
#include "cistron/comm/mpi/mpi.h"

namespace cistron::comm::mpi {

bool IsLaunched() {
  // mpirun of Open MPI; srun with PMIx and with PMI-2, and mpiexec of others.
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (GetEnv(variable)) return true;
  }
  return false;
}

}  // namespace cistron::comm::mpi
