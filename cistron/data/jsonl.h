// JSON lines to an index: one object a line, its sequence in one of its fields.
//
// The name of a record is its field "id", or "name" where there is no id or an empty one: a string,
// or a number, whose name is its text. Blank lines are legal.
// Errors, each with file and line: no JSON object, the field missing or not a string, a name that
// is neither string nor number, an empty sequence, a byte that is not of the alphabet. One line is
// held in memory at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cistron/data/sequence_index.h"

namespace cistron::data {

// The longest line that is accepted: it bounds the memory of reading.
inline constexpr std::size_t kMaxJsonLine = std::size_t{64} << 20;

// One parsed line.
struct JsonRecord {
  std::string sequence;
  std::string name;  // empty when there is none
};
// Parses a line. `place` ("FILE:LINE") begins the message of an error.
JsonRecord ParseJsonLine(std::string_view line, const SequenceRules& rules,
                         const std::string& place);

class JsonlIndexer {
 public:
  JsonlIndexer(std::string file, const SequenceRules& rules);

  void Feed(std::string_view chunk);
  SequenceIndex Finish();

 private:
  void Line(std::string_view line);

  std::string file_;
  const SequenceRules& rules_;
  SequenceIndex index_;
  std::string pending_;      // a line that has not ended yet
  std::int64_t offset_ = 0;  // of the line's first byte
  std::int64_t line_ = 0;
};

}  // namespace cistron::data
