// Where the records of a file are: what an index holds and how it is built.
//
// Memory: one Record a record and one Checkpoint for every kCheckpointBases bases.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/data/alphabet.h"

namespace cistron::data {

// Bases between two checkpoints of a record.
inline constexpr std::int64_t kCheckpointBases = 1 << 14;

// How a sequence is read back. A tag is the text from a delimiter to the next of the same; its
// bytes need not be of the alphabet and no label lies in it.
struct SequenceRules {
  const ByteTable* table = &ByteTable::Of(Alphabet::kDna);
  std::string tag_delimiters;  // one byte each
  std::string json_field;      // JSONL; empty: "sequence", or "text" where that is missing

  // 1 + the index of a delimiter; 0 for other bytes.
  std::uint8_t Delimiter(char byte) const {
    const std::size_t at = tag_delimiters.find(byte);
    return at == std::string::npos ? 0 : static_cast<std::uint8_t>(at + 1);
  }
};

struct Record {
  std::int64_t header = 0;    // byte offset of its '>' or of its JSON line
  std::int64_t sequence = 0;  // byte offset of its sequence; -1: escaped, only in its JSON line
  std::int64_t line = 0;      // 1-based line of `header`
  std::int64_t length = 0;    // bases
  std::int64_t first_checkpoint = 0;  // in SequenceIndex::checkpoints
  std::uint64_t name_hash = 0;        // HashName of the name; of "#<ordinal>" without one
};

// Checkpoint i ≥ 1 of a record stands at its base i·kCheckpointBases.
struct Checkpoint {
  std::int64_t offset : 56;   // byte offset of that base
  std::int64_t open_tag : 8;  // delimiter of the tag that it lies in, 0 for none
};

struct SequenceIndex {
  std::vector<Record> records;
  std::vector<Checkpoint> checkpoints;
  std::uint64_t content_hash = 0;  // XXH3 of all decoded bytes
};

// Advances over one byte of a sequence: the tag it lies in (delimiters belong to the tag) and the
// one that is open after it.
struct TagState {
  std::uint8_t open = 0;
  // True when the byte belongs to a tag.
  bool Advance(const SequenceRules& rules, char byte) {
    const std::uint8_t delimiter = rules.Delimiter(byte);
    if (open == 0) {
      open = delimiter;
      return delimiter != 0;
    }
    if (delimiter == open) open = 0;
    return true;
  }
};

}  // namespace cistron::data
