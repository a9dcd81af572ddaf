#include "apps/cistron/command.h"
#include "apps/cistron/commands.h"

int main(int argc, char** argv) {
  using namespace cistron::app;
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(MakeTrainCommand());
  commands.push_back(MakeEvalCommand());
  commands.push_back(MakeScoreCommand());
  commands.push_back(MakeBaselineCommand());
  commands.push_back(MakeConvertCommand());
  commands.push_back(MakeReportCommand());
  commands.push_back(MakeInspectCommand());
  commands.push_back(MakeInfoCommand());
  commands.push_back(MakeVerifyCommand());
  commands.push_back(MakeBenchCommand());
  return RunProgram(argc, argv, commands);
}
