// FASTA text to an index, in one pass over chunks of any size.
//
// Legal: lines of any length, blank lines, CRLF, a missing last newline, blanks inside lines, lower
// case, duplicate and empty names. Errors, each with file, record, line and remedy: no '>' first, a
// record without bases, a byte that is not of the alphabet, NUL, a tag that is not closed, a file
// without records.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cistron/data/sequence_index.h"

namespace cistron::data {

class FastaIndexer {
 public:
  // `file` names the source in messages. `rules` must outlive the indexer.
  FastaIndexer(std::string file, const SequenceRules& rules);

  void Feed(std::string_view chunk);
  SequenceIndex Finish();

 private:
  void Header(std::string_view text);
  void Sequence(std::string_view text);
  // Bases of a piece of a line that has blanks, tags or errors.
  void SequenceByBytes(std::string_view text);
  void StartRecord();
  void FinishRecord();
  std::string ShownName() const;  // of the present record, for messages
  std::string Place() const;

  std::string file_;
  const SequenceRules& rules_;
  SequenceIndex index_;
  Record record_;
  std::string name_;  // first kNameBytes bytes of the present header
  bool in_record_ = false, in_header_ = false, line_start_ = true;
  bool carriage_return_ = false;  // the header's last byte so far
  std::int64_t offset_ = 0;       // of the byte that is read now
  std::int64_t line_ = 0, column_ = 0;
  std::int64_t next_checkpoint_ = kCheckpointBases;
  TagState tag_;
  std::int64_t tag_line_ = 0;
};

// The name in a header line: the first word after '>', blanks before it left out. Empty without
// one.
std::string_view FastaName(std::string_view header);

// Bytes of a header that are read for its name.
inline constexpr std::size_t kNameBytes = 1024;

}  // namespace cistron::data
