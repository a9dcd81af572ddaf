// This process as one of several ranks that mpirun or srun started.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "cistron/comm/communicator.h"

namespace cistron::app {

// What the launcher has left in the environment: known before MPI has started.
struct LaunchedRank {
  int rank = 0;
  int size = 1;
  int local_size = 1;      // ranks on this machine
  std::string start = {};  // "mpirun -np 2": how people start so many
};
// Nothing in a process that was started as any other is.
std::optional<LaunchedRank> FindLaunchedRank();

// The rank's part of the processors of its machine, at least one; not more than the launcher has
// bound it to. `notice`: what a person should know where it is bound to fewer.
struct ThreadShare {
  int threads = 1;
  std::string notice = {};
};
ThreadShare ShareOfProcessors(const LaunchedRank& rank);

// Runs `body` with the communicator of all ranks, and returns the exit status. What `body` throws
// on all ranks alike (parallel::SharedError) is printed by the first, and all leave; what one rank
// throws ends all of them with its message and status. Once in a process; MPI has ended when this
// returns. A build without MPI says so.
int RunLaunched(const LaunchedRank& rank, const comm::Options& options,
                const std::function<void(comm::Communicator&)>& body);

// Ends all ranks with an error that this one, and mostly every one, has met before they talk.
int FailLaunched(const LaunchedRank& rank, const std::string& message);

}  // namespace cistron::app
