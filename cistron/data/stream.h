// From records on disk to the batches of a step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cistron/data/batch.h"

namespace cistron::data {

enum class Alphabet { kDna, kRna, kProtein, kBytes };

// How records are divided into training and held-out parts.
struct SplitRule {
  enum class Kind {
    kNone,     // everything trains
    kRegion,   // of each record of N bases the first floor(fraction·N) train, the rest is held out
    kRecords,  // whole records: those whose keyed hash falls above the fraction are held out
    kFiles,    // the files of `heldout` are held out
  } kind = Kind::kRegion;
  double train_fraction = 0.95;
};

struct FileSpec {
  std::filesystem::path path;
  double weight = 1.0;  // mixing weight of the file's windows
};

struct DataConfig {
  std::vector<FileSpec> train;
  std::vector<FileSpec> heldout;  // for SplitRule::kFiles
  Alphabet alphabet = Alphabet::kDna;
  SplitRule split;
  std::int64_t seq_len = 512;
  std::int64_t stride = 0;               // between the starts of training windows; 0: seq_len
  double reverse_complement = 0.5;       // probability, DNA and RNA only
  bool upper_case = true;
  double soft_mask_weight = 1.0;         // weight of a lower-case base's label; 0 masks it
  bool begin_token = false, end_token = false;
  std::vector<std::string> tag_delimiters;  // labels between a pair of these are masked
  std::filesystem::path cache_dir;       // for files that cannot seek (plain gzip)
  std::int64_t cache_limit_bytes = std::int64_t{16} << 30;
};

// Files indexed and split; immutable and shared. Memory is bounded by the number of records, never by
// their length.
class Corpus {
 public:
  // Throws cistron::Error with file, record, line, the offending character and the remedy.
  static std::shared_ptr<const Corpus> Open(const DataConfig& config);
  virtual ~Corpus() = default;
  virtual const DataConfig& config() const = 0;
  virtual std::int64_t train_bases() const = 0;
  virtual std::int64_t heldout_bases() const = 0;
};

// Where a stream stands: enough to continue it bit for bit.
struct StreamState {
  std::int64_t step = 0;
  std::int64_t epoch = 0;
  std::int64_t window = 0;  // next position in the epoch's permutation
  std::int64_t offset = 0;  // tokens of that window already used by the row before
};

// The global batch of one step: rows of seq_len tokens. Whole rows are dealt to ranks and micro-batches.
struct GlobalBatch {
  std::int64_t seq_len = 0;
  std::vector<Batch> rows;  // one row each
  BatchTotals totals;

  // Rows [begin, begin + count) as one micro-batch.
  Batch MicroBatch(std::int64_t begin, std::int64_t count) const;
};

// Windows in the order of a keyed permutation of all windows of an epoch, packed into rows.
class TrainingStream {
 public:
  TrainingStream(std::shared_ptr<const Corpus> corpus, std::uint64_t seed,
                 std::int64_t global_tokens);
  ~TrainingStream();

  // The batch at the present state; advances the state. What it returns is a pure function of
  // (corpus, seed, global_tokens, step).
  GlobalBatch Next();
  StreamState state() const;
  void Restore(const StreamState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Non-overlapping windows over the held-out part (or over every base of given files), forward strand, in
// order; the first base of each is not scored; labels other than the alphabet's own letters are ignored;
// all weights 1.
class EvaluationStream {
 public:
  explicit EvaluationStream(std::shared_ptr<const Corpus> corpus);
  ~EvaluationStream();

  std::int64_t num_rows() const;
  // Rows [begin, begin + count); short windows are rows with fewer tokens.
  Batch Rows(std::int64_t begin, std::int64_t count) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cistron::data
