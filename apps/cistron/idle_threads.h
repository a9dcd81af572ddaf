// How long idle OpenMP threads spin before they sleep.
#pragma once

namespace cistron::app {

// Threads that wait for the next parallel loop spin for some hundred microseconds, not for the
// milliseconds that are GNU OpenMP's default: beside another busy program those take the processor
// from the very threads they wait for. A choice in the environment (OMP_WAIT_POLICY or
// GOMP_SPINCOUNT) stays. The runtime reads its variables while the program is loaded, so the
// program starts itself again with the variable set: the first thing in main.
void LimitSpinning(char** argv);

}  // namespace cistron::app
