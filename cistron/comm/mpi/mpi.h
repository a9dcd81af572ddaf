// Ranks that are processes, started by mpirun or srun: Open MPI moves host memory between them.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "cistron/comm/communicator.h"

namespace cistron::comm::mpi {

// Whether this build has the transport.
bool IsBuilt();
// "Open MPI v4.1.4, …" or "not in this build".
std::string Describe();

// Whether mpirun or srun started this process as one rank of several or of one: their variables are
// in the environment.
bool IsLaunched();

struct RunOptions {
  Options communicator;
  // Exit status of a run that an exception ends; without it, 1.
  std::function<int(const std::exception&)> status_of;
  // MPI's start and end wait for every rank, without a limit of their own; they may take this or
  // communicator.limit, whichever is longer: ranks of a large job come one after another.
  std::chrono::milliseconds start_limit{60'000};
  // Longer messages are cut in pieces of so many bytes (a count is an int in MPI).
  std::int64_t largest_message = std::int64_t{1} << 30;
};

// Initialises MPI, runs f with the communicator of all processes, finalises MPI and returns what f
// returned. Once in a process; MPI is called by one thread at a time (MPI_THREAD_SERIALIZED).
//
// An exception that leaves f ends every process of the run: one rank, the lowest of those that fail
// at about the same time, writes "error: " and its message to standard error; MPI_Abort then ends
// all, whatever they do, with that rank's status. So does a watchdog that fires, since it throws.
// This call does not return then. A process that dies is noticed by mpirun, which ends the others,
// or, where the launcher does not, by the watchdog of a rank that waits for it.
//
// Throws kUnsupported where the transport is not built, or MPI has no MPI_THREAD_SERIALIZED.
int RunRank(const std::function<int(Communicator&)>& f, const RunOptions& options = {});

}  // namespace cistron::comm::mpi
