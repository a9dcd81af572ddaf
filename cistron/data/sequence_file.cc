#include "cistron/data/sequence_file.h"

#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/data/fasta.h"
#include "cistron/data/jsonl.h"

namespace cistron::data {
namespace {

constexpr std::int64_t kReadBytes = 1 << 14;

struct HashState {
  HashState() : state(XXH3_createState()) { XXH3_64bits_reset(state); }
  ~HashState() { XXH3_freeState(state); }
  HashState(const HashState&) = delete;
  HashState& operator=(const HashState&) = delete;
  XXH3_state_t* state;
};

bool IsBlank(char c) {
  return c == '\n' || c == '\r' || c == ' ' || c == '\t';
}

// Bases in a piece of FASTA: everything but blanks. Written so that compilers vectorise it.
std::int64_t CountBases(std::string_view text) {
  std::int64_t blanks = 0;
  for (const char c : text) blanks += IsBlank(c);
  return static_cast<std::int64_t>(text.size()) - blanks;
}

}  // namespace

std::unique_ptr<SequenceFile> SequenceFile::Open(const std::filesystem::path& path,
                                                 const SequenceRules& rules,
                                                 const DecodeCacheOptions& cache) {
  return std::make_unique<SequenceFile>(path.string(), OpenByteSource(path, cache), rules);
}

SequenceFile::SequenceFile(std::string name, std::unique_ptr<ByteSource> source,
                           SequenceRules rules)
    : name_(std::move(name)), source_(std::move(source)), rules_(std::move(rules)) {
  HashState hash;
  std::optional<FastaIndexer> fasta;
  std::optional<JsonlIndexer> jsonl;
  std::string blanks;  // before the first visible byte: they count as lines
  source_->Scan([&](std::string_view chunk) {
    XXH3_64bits_update(hash.state, chunk.data(), chunk.size());
    if (!fasta && !jsonl) {
      const auto visible = std::find_if_not(chunk.begin(), chunk.end(), IsBlank);
      if (visible == chunk.end()) {
        blanks += chunk;
        return;
      }
      json_ = *visible == '{';
      if (json_) {
        jsonl.emplace(name_, rules_);
        jsonl->Feed(blanks);
      } else {
        fasta.emplace(name_, rules_);
        fasta->Feed(blanks);
      }
    }
    if (json_) {
      jsonl->Feed(chunk);
    } else {
      fasta->Feed(chunk);
    }
  });
  if (!fasta && !jsonl) {
    CISTRON_THROW(kBadInput, "{}: holds no sequence: the file is empty{}", name_,
                  blanks.empty() ? "" : " but for blank lines");
  }
  index_ = json_ ? jsonl->Finish() : fasta->Finish();
  index_.content_hash = XXH3_64bits_digest(hash.state);
}

std::string SequenceFile::Place(const Record& record) const {
  return fmt::format("{}:{}", name_, record.line);
}

std::string SequenceFile::JsonLine(const Record& record) const {
  std::string line;
  for (;;) {
    const std::size_t size = line.size();
    line.resize(size + kReadBytes);
    const std::int64_t n = source_->Read(record.header + static_cast<std::int64_t>(size),
                                         line.data() + size, kReadBytes);
    line.resize(size + static_cast<std::size_t>(n));
    const std::size_t newline = line.find('\n', size);
    if (newline != std::string::npos) line.resize(newline);
    if (newline != std::string::npos || n < kReadBytes) break;
  }
  if (line.ends_with('\r')) line.pop_back();
  return line;
}

std::string SequenceFile::RecordName(std::int64_t record) const {
  const Record& r = index_.records.at(static_cast<std::size_t>(record));
  std::string name;
  if (json_) {
    name = ParseJsonLine(JsonLine(r), rules_, Place(r)).name;
  } else {
    char header[kNameBytes];
    const std::int64_t n = source_->Read(r.header, header, sizeof(header));
    name = FastaName({header, static_cast<std::size_t>(n)});
  }
  return name.empty() ? fmt::format("#{}", record) : name;
}

void SequenceFile::Read(std::int64_t record, std::int64_t begin, std::int64_t count,
                        std::string& bases, TagState* open_tag) const {
  const Record& r = index_.records.at(static_cast<std::size_t>(record));
  CISTRON_CHECK(begin >= 0 && count >= 0 && begin <= r.length - count,
                "SequenceFile::Read: bases [{}, {}) of a record of {}", begin, begin + count,
                r.length);
  bases.clear();
  if (json_ && r.sequence < 0) {
    // Escaped: only the parsed line has it.
    const std::string sequence = ParseJsonLine(JsonLine(r), rules_, Place(r)).sequence;
    TagState tag;
    if (!rules_.tag_delimiters.empty()) {
      for (std::int64_t i = 0; i < begin; ++i)
        tag.Advance(rules_, sequence[static_cast<std::size_t>(i)]);
    }
    if (open_tag) *open_tag = tag;
    bases = sequence.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    CISTRON_INVARIANT(static_cast<std::int64_t>(bases.size()) == count,
                      "{}: the file has changed since it was opened", Place(r));
    return;
  }
  const std::int64_t checkpoint = begin / kCheckpointBases;
  std::int64_t offset = r.sequence;
  TagState tag;
  if (checkpoint > 0) {
    const Checkpoint& c =
        index_.checkpoints[static_cast<std::size_t>(r.first_checkpoint + checkpoint - 1)];
    offset = c.offset;
    tag.open = static_cast<std::uint8_t>(c.open_tag);
  }
  std::int64_t skip = begin - checkpoint * kCheckpointBases;
  if (json_ && rules_.tag_delimiters.empty()) {
    offset += skip;
    skip = 0;
  }
  bases.reserve(static_cast<std::size_t>(count));
  char buffer[kReadBytes];
  while (static_cast<std::int64_t>(bases.size()) < count) {
    // A line of 60 bases has one or two blanks.
    const std::int64_t wanted = skip + count - static_cast<std::int64_t>(bases.size());
    const std::int64_t n = source_->Read(
        offset, buffer, std::min<std::int64_t>(kReadBytes, wanted + wanted / 16 + 64));
    if (n == 0) {
      CISTRON_THROW(kBadInput, "{}: the file has changed since it was opened; start again",
                    Place(r));
    }
    offset += n;
    std::string_view text(buffer, static_cast<std::size_t>(n));
    if (skip > 0 && rules_.tag_delimiters.empty()) {
      constexpr std::size_t kStep = 256;
      while (text.size() >= kStep) {
        const std::int64_t here = CountBases(text.substr(0, kStep));
        if (here > skip) break;
        skip -= here;
        text.remove_prefix(kStep);
      }
    }
    for (const char c : text) {
      if (!json_ && IsBlank(c)) continue;
      if (skip > 0) {
        --skip;
        if (!rules_.tag_delimiters.empty()) tag.Advance(rules_, c);
      } else {
        bases += c;
        if (static_cast<std::int64_t>(bases.size()) == count) break;
      }
    }
  }
  if (open_tag) *open_tag = tag;
}

}  // namespace cistron::data
