// SIGTERM, SIGINT and SIGUSR1 as a question that a loop asks. Batch systems can send the last some
// time before a job ends, and mpirun passes it on to all ranks.
#pragma once

namespace cistron::app {

// From now on the first of them is remembered; one that comes a second or more later ends the
// process at once. Call it before any thread has been started.
void CatchStopSignals();
// "SIGTERM", "SIGINT", "SIGUSR1", or null when none has come.
const char* StopSignal();

}  // namespace cistron::app
