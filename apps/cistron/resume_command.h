// The command that continues a run that was stopped, as people would type it.
#pragma once

#include <string>
#include <vector>

namespace cistron::app {

// What `cistron launch` leaves in the environment of ranks: its own command.
inline constexpr const char* kLaunchCommandVariable = "CISTRON_LAUNCH_COMMAND";

// What its ranks print, each on a line of its own, once CatchStopSignals has been called; launch
// does not show it.
inline constexpr const char* kSignalsCaughtLine = "cistron: this rank catches signals";

// As a shell reads it: quoted where it must be.
std::string ShellQuoted(const std::string& word);
// The words of a command, with blanks between them.
std::string ShellQuoted(const std::vector<std::string>& words);

// This process's own command line, quoted for a shell, with run.on_exists=auto where another value
// would not continue a run.
std::string OwnCommand();
// Of a rank: the command that started all of them.
std::string ResumeCommand();

}  // namespace cistron::app
