#include "cistron/base/threads.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <fstream>
#include <string>

#include "cistron/base/env.h"
#include "cistron/base/error.h"

namespace cistron {
namespace {

// CPUs granted by the cgroup's quota (v2, then v1); 0 when there is no limit.
int CgroupCpus() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) {
    return static_cast<int>(std::ceil(std::stod(quota) / period));
  }
  std::ifstream quota_v1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_v1("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double us = 0;
  if (quota_v1 >> us && us > 0 && period_v1 >> period && period > 0) {
    return static_cast<int>(std::ceil(us / period));
  }
  return 0;
}

std::atomic<int> g_threads{0};  // 0: not decided yet

// Of a process; 0: this one.
int GrantedCpus(pid_t process) {
  cpu_set_t set;
  CPU_ZERO(&set);
  int n = sched_getaffinity(process, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const int quota = CgroupCpus();
  if (quota > 0) n = std::min(n, quota);
  return std::max(1, n);
}

int DefaultThreads() {
  if (GetEnv("OMP_NUM_THREADS")) return std::max(1, omp_get_max_threads());
  return AvailableCpus();
}

// Keeps the first exception of a parallel region; OpenMP forbids letting one escape.
class FirstException {
 public:
  template <class F>
  void Run(F&& f) noexcept {
    try {
      f();
    } catch (...) {
#pragma omp critical(cistron_first_exception)
      {
        if (!error_) error_ = std::current_exception();
      }
    }
  }
  void Rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

}  // namespace

int AvailableCpus() {
  static const int cpus = GrantedCpus(0);
  return cpus;
}

int AvailableCpusOfParent() {
  return GrantedCpus(getppid());
}

int NumThreads() {
  int threads = g_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = DefaultThreads();
    SetNumThreads(threads);
  }
  return threads;
}

void SetNumThreads(int threads) {
  constexpr int kMost = 4096;  // the runtime dies of far more, with no message
  CISTRON_CHECK(threads >= 1 && threads <= kMost, "threads: {} is outside 1…{}", threads, kMost);
  g_threads.store(threads, std::memory_order_relaxed);
  omp_set_num_threads(threads);  // what oneDNN sees
}

namespace internal {

void RunChunks(std::int64_t n, std::int64_t grain, ChunkFunction function, void* state) {
  if (n <= 0) return;
  const std::int64_t by_grain =
      (n + std::max<std::int64_t>(grain, 1) - 1) / std::max<std::int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<std::int64_t>(NumThreads(), by_grain));
  if (threads <= 1 || omp_in_parallel()) {
    function(state, 0, n, 0);
    return;
  }
  FirstException first;
#pragma omp parallel num_threads(threads)
  {
    const int t = omp_get_thread_num();
    const int count = omp_get_num_threads();
    const std::int64_t begin = n * t / count;
    const std::int64_t end = n * (t + 1) / count;
    if (begin < end) first.Run([&] { function(state, begin, end, t); });
  }
  first.Rethrow();
}

void RunDynamic(std::int64_t n, ItemFunction function, void* state) {
  const int threads = static_cast<int>(std::min<std::int64_t>(NumThreads(), n));
  if (threads <= 1 || omp_in_parallel()) {
    for (std::int64_t i = 0; i < n; ++i) function(state, i);
    return;
  }
  FirstException first;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t i = 0; i < n; ++i) {
    first.Run([&] { function(state, i); });
  }
  first.Rethrow();
}

}  // namespace internal
}  // namespace cistron
