#include "apps/cistron/stop_signal.h"

#include <csignal>

namespace cistron::app {
namespace {

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t g_signal = 0;

extern "C" void RememberSignal(int number) {
  g_signal = number;
  // Whoever asks twice does not want to wait for a checkpoint.
  std::signal(number, SIG_DFL);
}

}  // namespace

void CatchStopSignals() {
  struct sigaction action {};
  action.sa_handler = RememberSignal;
  action.sa_flags = SA_RESTART;  // writes of a checkpoint are not cut short
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

const char* StopSignal() {
  return g_signal == SIGTERM ? "SIGTERM" : g_signal == SIGINT ? "SIGINT" : nullptr;
}

}  // namespace cistron::app
