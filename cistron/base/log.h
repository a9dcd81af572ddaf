// Log lines to standard error. The library logs; only the program writes to standard output.
//
// spdlog stands behind it; its headers are included in log.cc alone because they are slow to
// compile.
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace cistron {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void SetLogLevel(LogLevel level);
void LogMessage(LogLevel level, std::string_view message);

template <class... Args>
void LogDebug(fmt::format_string<Args...> format, Args&&... args) {
  LogMessage(LogLevel::kDebug, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <class... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  LogMessage(LogLevel::kInfo, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <class... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  LogMessage(LogLevel::kWarning, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <class... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  LogMessage(LogLevel::kError, fmt::vformat(format, fmt::make_format_args(args...)));
}

}  // namespace cistron
