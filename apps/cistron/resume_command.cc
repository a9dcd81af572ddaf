#include "apps/cistron/resume_command.h"

#include <fstream>
#include <string_view>

#include "apps/cistron/launched_rank.h"
#include "cistron/base/env.h"

namespace cistron::app {

std::string ShellQuoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string ShellQuoted(const std::vector<std::string>& words) {
  std::string quoted;
  for (const std::string& word : words) quoted += (quoted.empty() ? "" : " ") + ShellQuoted(word);
  return quoted;
}

std::string OwnCommand() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(in, word, '\0');) {
    words.push_back(word.starts_with("run.on_exists=") ? "run.on_exists=auto" : word);
  }
  return ShellQuoted(words);
}

std::string ResumeCommand() {
  if (const auto launch = GetEnv(kLaunchCommandVariable)) return *launch;
  const auto launched = FindLaunchedRank();
  return (launched ? launched->start + " " : "") + OwnCommand();
}

}  // namespace cistron::app
