#include "apps/cistron/command.h"
#include "apps/cistron/commands.h"
#include "apps/cistron/idle_threads.h"

int main(int argc, char** argv) {
  namespace app = cistron::app;
  app::LimitSpinning(argv);
  std::vector<std::unique_ptr<app::Command>> commands;
  commands.push_back(app::MakeTrainCommand());
  commands.push_back(app::MakeLaunchCommand());
  commands.push_back(app::MakeEvalCommand());
  commands.push_back(app::MakeScoreCommand());
  commands.push_back(app::MakeBaselineCommand());
  commands.push_back(app::MakeConvertCommand());
  commands.push_back(app::MakeReportCommand());
  commands.push_back(app::MakeInspectCommand());
  commands.push_back(app::MakeInfoCommand());
  commands.push_back(app::MakeVerifyCommand());
  commands.push_back(app::MakeBenchCommand());
  commands.push_back(app::MakePlanCommand());
  return app::RunProgram(argc, argv, commands);
}
