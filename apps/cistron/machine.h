// Facts of this machine and this build, for `info` and for the report of a run.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cistron/ops/context.h"

namespace cistron::app {

// Name and value, in the order in which they are shown.
std::vector<std::pair<std::string, std::string>> MachineFacts();
// "cpu", and each GPU with its memory and compute capability.
std::vector<std::string> DeviceTexts();
// The context of an option `--device`, "cpu" or "cuda".
ops::Context MakeContext(const std::string& device);
// machine.json of a run directory.
void WriteMachine(const std::filesystem::path& file);

}  // namespace cistron::app
