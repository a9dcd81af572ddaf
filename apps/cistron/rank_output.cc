#include "apps/cistron/rank_output.h"

#include <charconv>
#include <utility>

namespace cistron::app {
namespace {

struct Tag {
  std::size_t length = 0;  // 0: these bytes are none
  bool cut = false;        // they may become one
  int rank = 0;
};

// "[JOB,RANK]<stdout>:" or "<stderr>:" at the beginning of `bytes`.
Tag ReadTag(std::string_view bytes) {
  for (const std::string_view end : {"]<stdout>:", "]<stderr>:"}) {
    std::size_t at = 0;
    Tag tag;
    const auto literal = [&](std::string_view text) {
      const std::string_view there = bytes.substr(at, text.size());
      tag.cut = there.size() < text.size() && text.starts_with(there);
      at += there.size();
      return there == text;
    };
    const auto number = [&](int& value) {
      const char* const last = bytes.data() + bytes.size();
      const auto [rest, error] = std::from_chars(bytes.data() + at, last, value);
      at = static_cast<std::size_t>(rest - bytes.data());
      tag.cut = rest == last;
      return error == std::errc() && !tag.cut;
    };
    int job = 0;
    if (literal("[") && number(job) && literal(",") && number(tag.rank) && literal(end)) {
      tag.length = at;
      return tag;
    }
    if (tag.cut) return tag;
  }
  return {};
}

}  // namespace

void RankOutput::Add(std::string_view bytes) {
  pending_ += bytes;
  std::size_t at = 0;
  while (at < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(at);
    if (rest.front() == '[') {
      const Tag tag = ReadTag(rest);
      if (tag.cut) break;
      if (tag.length > 0) {
        rank_ = tag.rank;
        at += tag.length;
        continue;
      }
    }
    const std::size_t next = rest.substr(1).find_first_of("[\n");
    std::size_t length = next == std::string_view::npos ? rest.size() : next + 1;
    if (rest.front() == '\n') length = 1;
    Take(rest.substr(0, length));
    at += length;
  }
  pending_.erase(0, at);
}

void RankOutput::Take(std::string_view bytes) {
  std::string& line = partial_[rank_];
  if (bytes != "\n") {
    line += bytes;
    return;
  }
  on_line_(rank_, std::exchange(line, {}));
  rank_ = kLauncher;  // every line of a rank has its tag
}

void RankOutput::Finish() {
  Take(std::exchange(pending_, {}));
  for (auto& [rank, line] : partial_) {
    if (!line.empty()) on_line_(rank, std::exchange(line, {}));
  }
}

}  // namespace cistron::app
