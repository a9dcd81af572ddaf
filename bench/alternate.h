// Timing for micro-benchmarks: alternatives take turns, so that whatever else the machine does hits
// all of them alike.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <vector>

namespace cistron::bench {

// Counts wall time, or with CLOCK_PROCESS_CPUTIME_ID the processor time of the process: with one
// thread that tells something on a machine that is busy with other work.
inline double Now(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Options {
  clockid_t clock = CLOCK_MONOTONIC;
  double seconds = 0.4;  // for each group of alternatives
};

// --clock wall|cpu, --seconds S
inline Options ParseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--clock") == 0 && std::strcmp(argv[i + 1], "cpu") == 0) {
      options.clock = CLOCK_PROCESS_CPUTIME_ID;
    }
    if (std::strcmp(argv[i], "--seconds") == 0) options.seconds = std::atof(argv[i + 1]);
  }
  return options;
}

// Median seconds of each function, which run in turn until the time is over (five rounds at least).
// The first round warms up and does not count.
inline std::vector<double> Alternate(const Options& options,
                                     const std::vector<std::function<void()>>& functions) {
  std::vector<std::vector<double>> times(functions.size());
  const double end = Now(options.clock) + options.seconds;
  for (int round = 0; round < 6 || Now(options.clock) < end; ++round) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const double start = Now(options.clock);
      functions[i]();
      if (round > 0) times[i].push_back(Now(options.clock) - start);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& t : times) {
    std::nth_element(t.begin(), t.begin() + static_cast<std::ptrdiff_t>(t.size() / 2), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  return medians;
}

// A benchmark's main function: runs `run`, and reports what it throws.
template <class F>
int Main(F&& run) {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace cistron::bench
