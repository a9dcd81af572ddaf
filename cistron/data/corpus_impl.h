// What the streams see of a corpus.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cistron/data/corpus.h"
#include "cistron/data/sequence_file.h"
#include "cistron/data/window_grid.h"

namespace cistron::data {

// A contiguous stretch of one record that belongs to one part. Its tokens are [begin token] bases
// [end token]; the special ones only where the stretch touches the record's ends.
struct Segment {
  std::int64_t record = 0;  // in its file
  std::int64_t begin = 0, end = 0;
  std::int32_t file = 0;
  bool begin_token = false, end_token = false;
  std::int64_t first_window = 0;  // in the file's training windows

  std::int64_t tokens() const { return end - begin + begin_token + end_token; }
};

// Tokens of a window with what they weigh as labels of the token before them.
struct WindowTokens {
  std::vector<std::int64_t> tokens;
  std::vector<float> label_weights;  // 0: masked
  std::vector<std::uint8_t> scored;  // one of the alphabet's own letters, of either case, in no tag
};

// The training windows of one file.
struct FileWindows {
  std::size_t begin = 0, end = 0;  // its segments in Corpus::Impl::train
  std::int64_t windows = 0;        // of one pass
  std::int64_t tokens = 0;         // of one pass
  double weight = 1;
};

struct Corpus::Impl {
  DataConfig config;
  SequenceRules rules;
  WindowGrid grid;
  std::vector<std::unique_ptr<SequenceFile>> files;
  std::vector<std::int64_t> first_record;  // of each file, and the total
  std::vector<Segment> train, heldout;     // in the order of files
  std::vector<FileWindows> train_files;    // those that have windows
  std::int64_t train_bases = 0, heldout_bases = 0;
  std::uint64_t fingerprint = 0;

  // Tokens [start, start + count) of a segment, forward or reverse strand (a window with a tag
  // stays forward).
  void ReadWindow(const Segment& segment, std::int64_t start, std::int64_t count, bool reverse,
                  WindowTokens& out) const;
  // Segments of a part; kAll gives whole records and fills `storage`.
  const std::vector<Segment>& Segments(Part part, std::vector<Segment>& storage) const;
};

}  // namespace cistron::data
