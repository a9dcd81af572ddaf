// No thread that computes may ever run a signal handler: oneDNN's generated matrix kernels use the
// stack pointer as an ordinary register, so the kernel would write the handler's frame into the
// middle of the heap (seen with oneDNN 2.6.3: "corrupted size vs. prev_size" after a SIGTERM). All
// threads therefore block the signals, and one of their own waits for them.
#include "apps/cistron/stop_signal.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

namespace cistron::app {
namespace {

std::atomic<int> g_signal{0};

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGUSR1);
  return set;
}

void Wait() {
  using Clock = std::chrono::steady_clock;
  const sigset_t set = StopSignals();
  int number = 0;
  if (sigwait(&set, &number) != 0) return;
  g_signal = number;
  const Clock::time_point first = Clock::now();
  while (sigwait(&set, &number) == 0) {
    // `timeout` and batch systems send the same signal to a process and to its group: one request.
    if (Clock::now() - first < std::chrono::seconds(1)) continue;
    // Whoever asks again does not want to wait for a checkpoint.
    _exit(128 + number);
  }
}

}  // namespace

void CatchStopSignals() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);  // threads inherit it
  std::thread(Wait).detach();
}

const char* StopSignal() {
  const int number = g_signal;
  return number == SIGTERM   ? "SIGTERM"
         : number == SIGINT  ? "SIGINT"
         : number == SIGUSR1 ? "SIGUSR1"
                             : nullptr;
}

}  // namespace cistron::app
