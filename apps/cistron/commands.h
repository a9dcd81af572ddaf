// Every verb of the program, one file each.
#pragma once

#include <memory>

#include "apps/cistron/command.h"

namespace cistron::app {

std::unique_ptr<Command> MakeTrainCommand();
std::unique_ptr<Command> MakeLaunchCommand();
std::unique_ptr<Command> MakeEvalCommand();
std::unique_ptr<Command> MakeScoreCommand();
std::unique_ptr<Command> MakeBaselineCommand();
std::unique_ptr<Command> MakeConvertCommand();
std::unique_ptr<Command> MakeReportCommand();
std::unique_ptr<Command> MakeInspectCommand();
std::unique_ptr<Command> MakeInfoCommand();
std::unique_ptr<Command> MakeVerifyCommand();
std::unique_ptr<Command> MakeBenchCommand();
std::unique_ptr<Command> MakePlanCommand();

}  // namespace cistron::app
