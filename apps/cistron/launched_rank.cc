#include "apps/cistron/launched_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <initializer_list>
#include <thread>

#include "apps/cistron/command.h"
#include "apps/cistron/failure.h"
#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/parallel/agreement.h"

namespace cistron::app {
namespace {

// The first of these variables that holds a number. Lists of Slurm ("2(x3)") begin with one.
std::optional<int> Number(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    const auto text = GetEnv(variable);
    int number = 0;
    if (text &&
        std::from_chars(text->data(), text->data() + text->size(), number).ec == std::errc())
      return number;
  }
  return std::nullopt;
}

}  // namespace

std::optional<LaunchedRank> FindLaunchedRank() {
  if (!comm::mpi::IsLaunched()) return std::nullopt;
  LaunchedRank r;
  r.rank = Number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}).value_or(0);
  r.size = Number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"})
               .value_or(1);
  const int nodes = std::max(Number({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}).value_or(1), 1);
  r.local_size = Number({"OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"})
                     .value_or((r.size + nodes - 1) / nodes);
  r.start = GetEnv("OMPI_COMM_WORLD_SIZE") ? fmt::format("mpirun -np {}", r.size)
                                           : fmt::format("srun -n {}", r.size);
  return r;
}

ThreadShare ShareOfProcessors(const LaunchedRank& rank) {
  const int machine = AvailableCpusOfParent();  // the launcher's: not bound as its ranks may be
  const int fair = std::max(machine / std::max(rank.local_size, 1), 1), bound = AvailableCpus();
  if (bound >= fair) return {fair};
  return {bound, fmt::format("each rank is bound to {} of {} processors; with `mpirun --bind-to "
                             "none` it would use {}",
                             bound, machine, fair)};
}

int RunLaunched(const LaunchedRank& rank, const comm::Options& options,
                const std::function<void(comm::Communicator&)>& body) {
  if (!comm::mpi::IsBuilt()) {
    if (rank.rank != 0) {  // the first one speaks, and its launcher ends the others
      std::this_thread::sleep_for(std::chrono::seconds(2));
      return kBadUsage;
    }
    CISTRON_THROW(kUnsupported,
                  "{} ranks were started, and this build has no MPI. Install Open MPI (Debian: "
                  "libopenmpi-dev openmpi-bin), configure and build again; or start the program "
                  "without mpirun: ranks are then threads of one process",
                  rank.size);
  }
  const auto run = [&](comm::Communicator& world) -> int {
    try {
      body(world);
      return kOk;
    } catch (const std::exception& error) {
      const bool shared = dynamic_cast<const parallel::SharedError*>(&error) != nullptr;
      if (!shared && world.size() > 1) throw;
      return world.rank() == 0 ? ReportFailure(error) : StatusOf(error);
    }
  };
  return comm::mpi::RunRank(run, {.communicator = options, .status_of = StatusOf});
}

int FailLaunched(const LaunchedRank& rank, const std::string& message) {
  return RunLaunched(rank, {}, [&](comm::Communicator& world) {
    throw Error(ErrorCode::kInvalidArgument, message);
  });
}

}  // namespace cistron::app
