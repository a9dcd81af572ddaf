#include "cistron/data/fasta.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/base/text.h"

namespace cistron::data {
namespace {

// All flags that occur in the text. The table is small and hot: this runs at load speed.
std::uint8_t FlagsOf(std::string_view text, const std::uint8_t* table) {
  std::uint8_t a = 0, b = 0, c = 0, d = 0;
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  std::size_t i = 0;
  for (; i + 4 <= text.size(); i += 4) {
    a |= table[p[i]];
    b |= table[p[i + 1]];
    c |= table[p[i + 2]];
    d |= table[p[i + 3]];
  }
  for (; i < text.size(); ++i) a |= table[p[i]];
  return static_cast<std::uint8_t>(a | b | c | d);
}

}  // namespace

std::string_view FastaName(std::string_view header) {
  if (header.starts_with('>')) header.remove_prefix(1);
  header.remove_prefix(std::min(header.find_first_not_of(" \t"), header.size()));
  return header.substr(0, header.find_first_of(std::string_view(" \t\r\n\x01", 5)));
}

FastaIndexer::FastaIndexer(std::string file, const SequenceRules& rules)
    : file_(std::move(file)), rules_(rules) {}

std::string FastaIndexer::ShownName() const {
  return Printable(FastaName(name_));
}

std::string FastaIndexer::Place() const {
  return in_record_ ? fmt::format("{}:{}: record '{}'", file_, line_, ShownName())
                    : fmt::format("{}:{}", file_, line_);
}

void FastaIndexer::Feed(std::string_view chunk) {
  while (!chunk.empty()) {
    if (line_start_) {
      ++line_;
      column_ = 0;
      line_start_ = false;
      if (chunk.front() == '>') StartRecord();
    }
    const void* newline = std::memchr(chunk.data(), '\n', chunk.size());
    const std::size_t n =
        newline ? static_cast<std::size_t>(static_cast<const char*>(newline) - chunk.data())
                : chunk.size();
    const std::string_view text = chunk.substr(0, n);
    const std::size_t consumed = n + (newline ? 1 : 0);
    if (in_header_) {
      Header(text);
    } else if (!text.empty()) {
      Sequence(text);
    }
    offset_ += static_cast<std::int64_t>(consumed);
    column_ += static_cast<std::int64_t>(n);
    if (newline) {
      line_start_ = true;
      if (in_header_) {
        in_header_ = false;
        record_.sequence = offset_;
        const std::string_view name = FastaName(name_);
        record_.name_hash =
            HashName(name.empty() ? fmt::format("#{}", index_.records.size()) : name);
      }
    }
    chunk.remove_prefix(consumed);
  }
}

void FastaIndexer::StartRecord() {
  FinishRecord();
  record_ = {};
  record_.header = offset_;
  record_.line = line_;
  record_.first_checkpoint = static_cast<std::int64_t>(index_.checkpoints.size());
  next_checkpoint_ = kCheckpointBases;
  name_.clear();
  in_record_ = in_header_ = true;
  carriage_return_ = false;
  tag_ = {};
}

void FastaIndexer::Header(std::string_view text) {
  if (text.empty()) return;
  if (name_.size() < kNameBytes) name_.append(text.substr(0, kNameBytes - name_.size()));
  if (text.find('\0') != std::string_view::npos) {
    CISTRON_THROW(kBadInput, "{}: NUL byte in the header line; the file is binary or damaged",
                  Place());
  }
  // A carriage return must end the line.
  const std::size_t at = text.find('\r');
  if (carriage_return_ || (at != std::string_view::npos && at + 1 < text.size())) {
    CISTRON_THROW(kBadInput,
                  "{}: a carriage return inside the header line: lines end as on old Macintoshes; "
                  "convert them: tr '\\r' '\\n' < old > new",
                  Place());
  }
  carriage_return_ = at != std::string_view::npos;
}

void FastaIndexer::Sequence(std::string_view text) {
  if (in_record_ && rules_.tag_delimiters.empty()) [[likely]] {
    // CRLF: the carriage return alone would make every line a slow one.
    const std::string_view bases = text.back() == '\r' ? text.substr(0, text.size() - 1) : text;
    if ((FlagsOf(bases, rules_.table->data()) & (kBlank | kIllegal)) == 0) [[likely]] {
      const std::int64_t after = record_.length + static_cast<std::int64_t>(bases.size());
      while (next_checkpoint_ < after) {
        index_.checkpoints.push_back({offset_ + next_checkpoint_ - record_.length, 0});
        next_checkpoint_ += kCheckpointBases;
      }
      record_.length = after;
      return;
    }
  }
  SequenceByBytes(text);
}

void FastaIndexer::SequenceByBytes(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const std::uint8_t flags = rules_.table->flags(static_cast<unsigned char>(c));
    if (flags & kBlank) continue;
    if (!in_record_) {
      const std::string_view shown = text.substr(i, 20);
      const char* hint =
          c == '@' ? "it looks like FASTQ: convert it with seqtk seq -a" : "give FASTA or JSONL";
      if (c == '\0') hint = "it is binary: give FASTA or JSONL";
      if (c == '\xEF' || c == '\xFE' || c == '\xFF') {
        hint = "it begins with a byte-order mark: save it as plain ASCII";
      }
      std::string printable;
      for (const char s : shown) printable += s >= 0x20 && s < 0x7f ? s : '.';
      CISTRON_THROW(kBadInput, "{}:{}: no FASTA: text '{}' before the first '>' header; {}", file_,
                    line_, printable, hint);
    }
    const std::uint8_t open = tag_.open;
    const bool in_tag = !rules_.tag_delimiters.empty() && tag_.Advance(rules_, c);
    if (in_tag && open == 0) tag_line_ = line_;
    if (c == '\0' || ((flags & kIllegal) && !in_tag)) {
      const std::size_t from = i < 32 ? 0 : i - 32;
      CISTRON_THROW(kBadInput, "{}, column {}: {}", Place(),
                    column_ + static_cast<std::int64_t>(i) + 1,
                    ExplainIllegalByte(rules_.table->alphabet(), static_cast<unsigned char>(c),
                                       text.substr(from, 64)));
    }
    if (record_.length == next_checkpoint_) {
      index_.checkpoints.push_back({offset_ + static_cast<std::int64_t>(i), open});
      next_checkpoint_ += kCheckpointBases;
    }
    ++record_.length;
  }
}

void FastaIndexer::FinishRecord() {
  if (!in_record_) return;
  if (record_.length == 0) {
    CISTRON_THROW(kBadInput,
                  "{}:{}: record '{}' has no sequence; remove its header or add the bases", file_,
                  record_.line, ShownName());
  }
  if (tag_.open != 0) {
    CISTRON_THROW(kBadInput, "{}:{}: record '{}': the tag opened here by '{}' is never closed",
                  file_, tag_line_, ShownName(), rules_.tag_delimiters[tag_.open - 1u]);
  }
  index_.records.push_back(record_);
  in_record_ = false;
}

SequenceIndex FastaIndexer::Finish() {
  FinishRecord();
  if (index_.records.empty()) {
    CISTRON_THROW(kBadInput, "{}: holds no record; give FASTA ('>' headers) or JSONL", file_);
  }
  index_.records.shrink_to_fit();
  index_.checkpoints.shrink_to_fit();
  return std::move(index_);
}

}  // namespace cistron::data
