#include "cistron/io/json.h"

#include <cstddef>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/text.h"

namespace cistron::io {
namespace {

constexpr std::size_t kLongestInMessage = 200;

// The part of nlohmann's message after its "[json.exception.…] " tag; bytes that may be no UTF-8
// are escaped.
std::string Reason(const std::exception& e) {
  std::string_view what = e.what();
  if (const std::size_t tag = what.find("] "); tag != what.npos) what.remove_prefix(tag + 2);
  std::string out;
  for (const char c : what.substr(0, kLongestInMessage)) {
    const unsigned char byte = static_cast<unsigned char>(c);
    out += byte >= 0x20 && byte < 0x7f ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return out;
}

}  // namespace

nlohmann::json ParseJson(std::string_view text, const std::string& origin, int max_depth) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::unordered_set<std::string>> keys;
  const auto check = [&](int depth, Event event, nlohmann::json& parsed) {
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        if (depth > max_depth) {
          CISTRON_THROW(kBadInput, "{}: JSON nested deeper than {} levels", origin, max_depth);
        }
        if (event == Event::object_start) keys.emplace_back();
        break;
      case Event::key:
        if (!keys.back().insert(parsed.get_ref<const std::string&>()).second) {
          CISTRON_THROW(kBadInput, "{}: the key {} appears twice in one JSON object", origin,
                        Quoted(parsed.get_ref<const std::string&>()));
        }
        break;
      case Event::object_end: keys.pop_back(); break;
      default: break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), check);
  } catch (const nlohmann::json::exception& e) {
    CISTRON_THROW(kBadInput, "{}: not valid JSON: {}", origin, Reason(e));
  }
}

std::string DumpJson(const nlohmann::json& document, int indent) {
  try {
    return document.dump(indent);
  } catch (const nlohmann::json::exception& e) {
    CISTRON_THROW(kInvalidArgument, "JSON: cannot write the document: {}", Reason(e));
  }
}

std::string Excerpt(const nlohmann::json& document) {
  constexpr std::size_t kLongest = 80;
  const std::string text = DumpJson(document);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "…";
}

std::string Quoted(std::string_view name) {
  return "'" + Printable(name) + "'";
}

}  // namespace cistron::io
