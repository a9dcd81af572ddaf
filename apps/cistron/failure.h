// How a verb that failed ends: what is printed, and the exit status.
#pragma once

#include <exception>

namespace cistron::app {

// The exit status for an error (ExitCode in command.h).
int StatusOf(const std::exception& error);
// Prints the error as one screen of text on standard error; returns its status.
int ReportFailure(const std::exception& error);

}  // namespace cistron::app
