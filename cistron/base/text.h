// Text for people: what comes from outside in messages and tables, and names that are near others.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace cistron {

// Text from outside for a message: control bytes as \xNN, and no more than its first bytes.
std::string Printable(std::string_view text, std::size_t longest = 200);

// Text from outside for a field of a table: all of it, control bytes and backslashes as \xNN, so
// that no field ends early and the text can be told from what is written.
std::string EscapedField(std::string_view text);

// Levenshtein distance, a swap of neighbours counting as one.
int EditDistance(std::string_view a, std::string_view b);

}  // namespace cistron
