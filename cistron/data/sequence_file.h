// One indexed file of sequences: any part of any record, by seeking.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cistron/data/byte_source.h"
#include "cistron/data/sequence_index.h"

namespace cistron::data {

class SequenceFile {
 public:
  // Opens and indexes a file; JSONL is told from FASTA by its first visible byte, '{'. Throws
  // cistron::Error with file, record, line, the offending character and the remedy.
  static std::unique_ptr<SequenceFile> Open(const std::filesystem::path& path,
                                            const SequenceRules& rules,
                                            const DecodeCacheOptions& cache);
  // The same over any source.
  SequenceFile(std::string name, std::unique_ptr<ByteSource> source, SequenceRules rules);

  const std::string& name() const { return name_; }
  const SequenceRules& rules() const { return rules_; }
  const std::vector<Record>& records() const { return index_.records; }
  std::uint64_t content_hash() const { return index_.content_hash; }

  // Name of a record, read from the file: the first word of its header, or its JSON "id" or "name";
  // "#<ordinal>" when it has none.
  std::string RecordName(std::int64_t record) const;

  // Bases [begin, begin + count) of a record, as they stand in the file. `open_tag`, when given,
  // receives the state before the first. Any number of threads may read.
  void Read(std::int64_t record, std::int64_t begin, std::int64_t count, std::string& bases,
            TagState* open_tag = nullptr) const;

 private:
  std::string Place(const Record& record) const;
  std::string JsonLine(const Record& record) const;

  std::string name_;
  std::unique_ptr<ByteSource> source_;
  SequenceRules rules_;
  bool json_ = false;
  SequenceIndex index_;
};

}  // namespace cistron::data
