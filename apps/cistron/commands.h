// Every verb of the program, one file each.
#pragma once

#include <memory>

#include "apps/cistron/command.h"

namespace cistron::app {

std::unique_ptr<Command> MakeInfoCommand();

}  // namespace cistron::app
