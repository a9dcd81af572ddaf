// SIGTERM and SIGINT as a question that a loop asks.
#pragma once

namespace cistron::app {

// From now on the first SIGTERM or SIGINT is remembered; one that comes a second
// or more later ends the process at once. Call it before any thread has been started.
void CatchStopSignals();
// "SIGTERM", "SIGINT", or null when none has come.
const char* StopSignal();

}  // namespace cistron::app
