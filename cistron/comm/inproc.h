// Ranks that are threads of this process: for tests, simulations, and several ranks without MPI.
#pragma once

#include <cstdint>
#include <functional>

#include "cistron/comm/communicator.h"

namespace cistron::comm {

// Checked: threads of one process compare their calls cheaply.
inline Options InprocOptions() {
  return {.checked = true};
}

// More are a mistake: each takes a stack and, where it trains, a model.
inline constexpr int kMostThreads = 4096;

// Told of every message, by the sender's thread, several at a time: ranks of the world, and bytes.
using MessageObserver = std::function<void(int from, int to, std::int64_t bytes)>;

// Runs f on `ranks` threads, at most kMostThreads, each with its rank of one communicator, and
// returns when all are done. The ranks share the threads of parallel loops: NumThreads() / ranks
// for each, at least one, until this returns. Not to be called by two threads at a time.
//
// The first exception that a rank throws ends the others at their next wait inside an operation
// (kIo), and is rethrown here; so does a watchdog that fires. A rank that returns while
// another waits for it ends the run too. A rank that computes without end cannot be ended: its
// thread is waited for.
void RunRanks(int ranks, const std::function<void(Communicator&)>& f,
              const Options& options = InprocOptions(), const MessageObserver& observer = {});

}  // namespace cistron::comm
