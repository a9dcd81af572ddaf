// From records on disk to the batches of a step. What is read is a function of (corpus, seed,
// step).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/data/corpus.h"
#include "cistron/data/sequence_bounds.h"

namespace cistron::data {

// Where a stream stands: enough to continue it bit for bit.
struct StreamState {
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  std::int64_t window = 0;  // next position in the epoch's permutation
  std::int64_t offset = 0;  // tokens of that window already used by the row before
};

// The global batch of one step: rows of seq_len tokens. Whole rows are dealt to ranks and
// micro-batches.
struct GlobalBatch {
  std::int64_t seq_len = 0;
  std::vector<Batch> rows;  // one row each
  BatchTotals totals;
  WindowLengths windows;  // of the stream; all 0: micro-batches get no bounds

  // Rows [begin, begin + count) as one micro-batch. Where not all windows fill a row, its sequences
  // have the bounds of all micro-batches of as many rows: up to windows.longest tokens, and
  // SequencesBound sequences (twice that, or more, where they have more), the last ones empty.
  Batch MicroBatch(std::int64_t begin, std::int64_t count) const;
};

// Windows in the order of a keyed permutation of all windows of an epoch, packed into rows.
//
// Windows. Each training segment (a record, or its training region) is covered as window_grid.h
// says,
//   with a phase drawn for (seed, pass, segment): no two epochs cut a genome at the same places.
// Epoch. File f of weight w with M windows gives, in epoch e, its draws floor(e·w·M) …
// floor((e+1)·w·M) − 1.
//   Draw k is element k mod M of a keyed permutation of the file's windows that belongs to pass
//   floor(k / M): every pass visits each window once, whatever the weight (for w = 1 a pass is an
//   epoch). The draws of all files, in the order of the config, are numbered; that number is the
//   global index.
// Order. Position p of an epoch is global index π(p), π a keyed permutation of all of them: windows
// of one
//   file or record are spread over the whole epoch, in constant memory.
// Strand. A window is read from the other strand with probability data.reverse_complement, drawn
// for
//   (seed, epoch, global index).
// Cut rule. Windows follow one another without gaps; rows are cut every seq_len tokens. A window
// that
//   does not fit is cut at the row's end and its rest begins the next row (or the next step's
//   first) as a sequence of its own, positions from 0. Each token of a window is in exactly one
//   row; there is no padding. Where all windows are full, each is a row. The stream runs on over
//   the ends of epochs.
// Labels. The next token in the same piece; the last of a piece has none. A label that is
// degenerate, in
//   a tag, or of weight 0 is ops::kIgnoreLabel with weight 0. An all-N batch has weight_sum 0.
class TrainingStream {
 public:
  // Throws when global_tokens is not a positive multiple of seq_len, or exceeds the tokens of an
  // epoch; and when no label of the training part has any weight.
  TrainingStream(std::shared_ptr<const Corpus> corpus, std::uint64_t seed,
                 std::int64_t global_tokens);
  ~TrainingStream();
  TrainingStream(TrainingStream&&) noexcept;
  TrainingStream& operator=(TrainingStream&&) noexcept;

  // The batch at the present state; advances the state. What it returns is a pure function of
  // (corpus, seed, global_tokens, step). One thread at a time; different streams are independent.
  GlobalBatch Next();
  StreamState state() const;
  // Throws when the state cannot be one of this corpus.
  void Restore(const StreamState& state);

  const WindowLengths& window_lengths() const;
  std::int64_t windows_in_epoch(std::int64_t epoch) const;
  // Tokens of an epoch, on average over epochs where weights are fractions.
  double tokens_per_epoch() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Where a row of an evaluation comes from.
struct EvaluationRow {
  std::int64_t record = 0;  // of Corpus::record
  std::int64_t begin = 0;   // its first base in the record
  std::int64_t tokens = 0;
};

// Non-overlapping windows of seq_len tokens over a part of the corpus, forward strand, in order;
// the first base of each is not scored; labels other than the alphabet's own letters are ignored;
// all other weights are 1. A window of one token has nothing to score and is left out.
class EvaluationStream {
 public:
  // Throws when the part has no window, or is the held-out part and has nothing to score. (Files
  // that are evaluated whole may have records, or be, without a base to score.)
  explicit EvaluationStream(std::shared_ptr<const Corpus> corpus, Part part = Part::kHeldout);
  ~EvaluationStream();
  EvaluationStream(EvaluationStream&&) noexcept;
  EvaluationStream& operator=(EvaluationStream&&) noexcept;

  std::int64_t num_rows() const;
  // Rows of one record stand together, so scores add up a record at a time.
  EvaluationRow Row(std::int64_t row) const;
  // Rows [begin, begin + count), one sequence each; short windows are rows with fewer tokens (T is
  // the sum of the lengths).
  Batch Rows(std::int64_t begin, std::int64_t count) const;

 private:
  // Reads up to the first label that is scored.
  bool AnyScored() const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cistron::data
