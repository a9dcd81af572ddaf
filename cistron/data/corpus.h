// Files of sequences, indexed and divided into a training and a held-out part.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/data/alphabet.h"

namespace cistron::data {

// How records are divided into training and held-out parts.
struct SplitRule {
  enum class Kind {
    kNone,     // everything trains
    kRegion,   // of each record of N bases the first floor(fraction·N) train, the rest is held out
    kRecords,  // whole records: those whose keyed hash falls above the fraction are held out
    kFiles,    // the files of `heldout` are held out; none may have the content of a training file
  } kind = Kind::kRegion;
  double train_fraction = 0.95;
  // kRecords: a record trains iff Mix64(HashName(name) ^ Mix64(key)) < fraction·2^64. Records of
  // one name fall on one side; the training seed plays no part.
  std::uint64_t key = 0;
};

struct FileSpec {
  std::filesystem::path path;
  // How many times each window of the file appears in an epoch: 2 shows it twice, 0.5 every other
  // epoch (training_stream: see stream.h). It multiplies the file's size; it does not replace it.
  double weight = 1.0;
};

struct DataConfig {
  std::vector<FileSpec> train;
  std::vector<FileSpec> heldout;  // for SplitRule::kFiles
  Alphabet alphabet = Alphabet::kDna;
  SplitRule split;
  std::int64_t seq_len = 512;
  std::int64_t stride = 0;  // between the starts of training windows, ≤ seq_len; 0: seq_len
  double reverse_complement = 0.5;  // probability, DNA and RNA only
  bool upper_case = true;           // not for bytes
  double soft_mask_weight = 1.0;    // weight of a lower-case base's label; 0 masks it
  // Before the first and after the last base of a record (not of a window or of a split region's
  // cut).
  bool begin_token = false, end_token = false;
  // One byte each; labels from one to the next of the same are masked, delimiters included. Bytes
  // of a tag may be of any alphabet and keep their case; windows that touch one are not reversed.
  std::vector<std::string> tag_delimiters;
  std::string json_field;           // JSONL; empty: "sequence", or "text" where that is missing
  std::filesystem::path cache_dir;  // for files that cannot seek (plain gzip); empty: the default
  std::int64_t cache_limit_bytes = std::int64_t{16} << 30;
};

enum class Part { kTrain, kHeldout, kAll };

// A record by its number in the corpus: files in the order of the config, records in that of the
// file.
struct RecordInfo {
  std::string name;  // first word of the header, JSON id or name; "#<ordinal>" without one
  std::filesystem::path file;
  std::int64_t line = 0;    // of its header
  std::int64_t length = 0;  // bases
};

// Files indexed and split; immutable and shared by any number of streams and threads. Memory is
// bounded by the number of records (and 1/2048 of the bases), never by their length.
class Corpus {
 public:
  // Throws cistron::Error with file, record, line, the offending character and the remedy: see the
  // error list of docs/data.md. A split other than kNone must leave something on both sides.
  static std::shared_ptr<const Corpus> Open(const DataConfig& config);
  ~Corpus();

  const DataConfig& config() const;
  std::int64_t train_bases() const;
  std::int64_t heldout_bases() const;
  // Of all files, training ones first.
  std::int64_t num_records() const;
  RecordInfo record(std::int64_t index) const;
  // Hash of the content of all files and of every setting that decides what is read: a resumed run
  // compares it. Paths play no part.
  std::uint64_t fingerprint() const;

  // The bases of a part, in order, in chunks of at most 1 MiB, upper-cased if the config says so;
  // degenerate bases are there as they are. `starts_segment` is true on the first chunk of each
  // contiguous stretch.
  using ChunkFunction = std::function<void(std::string_view bases, bool starts_segment)>;
  void ForEachChunk(Part part, const ChunkFunction& chunk) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Corpus(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace cistron::data
