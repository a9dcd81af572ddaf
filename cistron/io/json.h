// JSON that comes from outside, parsed with bounds. Internal: users of the library need no JSON
// headers, and only .cc files that look into a document include nlohmann/json.hpp.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace cistron::io {

// Parses one document. `origin` names it in errors. Throws kBadInput on a syntax error (with line
// and column), text that is not UTF-8, a key that an object holds twice, or nesting beyond
// `max_depth`.
nlohmann::json ParseJson(std::string_view text, const std::string& origin, int max_depth = 32);

// Text of a document; `indent` < 0 puts it on one line. Throws kInvalidArgument when a string in it
// is not UTF-8.
std::string DumpJson(const nlohmann::json& document, int indent = -1);

// The beginning of a document's text for a message.
std::string Excerpt(const nlohmann::json& document);

// A name from outside for a message: in quotes, control characters escaped, cut when very long.
std::string Quoted(std::string_view name);

}  // namespace cistron::io
