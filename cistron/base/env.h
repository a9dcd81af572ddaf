// Environment variables that Cistron reads. Each is read through here, so `cistron info` can list
// them.
#pragma once

#include <optional>
#include <string>

namespace cistron {

// Value of an environment variable, or nothing when it is unset or empty.
std::optional<std::string> GetEnv(const char* name);

}  // namespace cistron
