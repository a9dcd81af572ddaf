#include "apps/cistron/idle_threads.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace cistron::app {
namespace {

// Rounds of a pause each: docs/decisions/0011-idle-threads.md has the measurements.
constexpr const char* kSpinCount = "10000";

}  // namespace

void LimitSpinning(char** argv) {
  // Set, even to nothing, is chosen; and the second start sees the variable of the first.
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || setenv("GOMP_SPINCOUNT", kSpinCount, 1) != 0) return;
  execv(self.c_str(), argv);
  // Where that fails the program goes on as it is.
}

}  // namespace cistron::app
