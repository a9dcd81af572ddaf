#include "cistron/data/jsonl.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/base/text.h"

namespace cistron::data {
namespace {

using nlohmann::json;

// Takes the top-level values that matter and lets everything else pass: no tree is built.
class LineHandler final : public nlohmann::json_sax<json> {
 public:
  explicit LineHandler(const std::string& wanted) : wanted_(wanted) {}

  bool null() override { return Other("null"); }
  bool boolean(bool) override { return Other("a boolean"); }
  bool number_integer(number_integer_t n) override { return Number(std::to_string(n)); }
  bool number_unsigned(number_unsigned_t n) override { return Number(std::to_string(n)); }
  // `text`: as it stands in the line.
  bool number_float(number_float_t, const string_t& text) override { return Number(text); }
  bool binary(binary_t&) override { return Other("binary"); }
  bool start_object(std::size_t) override {
    Other("an object");
    ++depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    Other("a list");
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& text) override {
    if (depth_ == 1) {
      key_ = text;
      if (keys.size() < 200) keys += (keys.empty() ? "" : ", ") + text;
    }
    return true;
  }
  bool string(string_t& value) override {
    if (depth_ != 1) return true;
    const bool preferred = IsSequence();
    if (preferred || (wanted_.empty() && key_ == "text" && !found_preferred_)) {
      found = true;
      found_preferred_ = preferred;
      sequence = std::move(value);
    } else if (NameField* field = Field()) {
      *field = {.text = std::move(value)};
    }
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    problem = fmt::format("column {}: {}", position, error.what());
    return false;
  }

  struct NameField {
    std::string text;               // empty: not given
    std::string_view wrong_type{};  // what it is instead of a string or a number
  };
  std::string sequence;
  NameField id, name;
  bool found = false, wrong_type = false;
  std::string keys, problem;

 private:
  bool IsSequence() const { return key_ == (wanted_.empty() ? "sequence" : wanted_); }
  NameField* Field() { return key_ == "id" ? &id : key_ == "name" ? &name : nullptr; }

  bool Number(std::string text) {
    if (depth_ != 1) return true;
    if (IsSequence()) {
      wrong_type = true;
    } else if (NameField* field = Field()) {
      *field = {.text = std::move(text)};
    }
    return true;
  }
  // A value that is neither: an error where the sequence or the name should be.
  bool Other(std::string_view what) {
    if (depth_ != 1) return true;
    if (IsSequence()) {
      wrong_type = true;
    } else if (NameField* field = Field()) {
      *field = {.text = {}, .wrong_type = what};
    }
    return true;
  }

  const std::string& wanted_;
  std::string key_;
  int depth_ = 0;
  bool found_preferred_ = false;
};

std::string FieldName(const SequenceRules& rules) {
  return rules.json_field.empty() ? "\"sequence\" or \"text\"" : "\"" + rules.json_field + "\"";
}

}  // namespace

JsonRecord ParseJsonLine(std::string_view line, const SequenceRules& rules,
                         const std::string& place) {
  const std::size_t first = line.find_first_not_of(" \t");
  if (first == std::string_view::npos || line[first] != '{') {
    CISTRON_THROW(kBadInput, "{}: not a JSON object; JSONL holds one object a line", place);
  }
  LineHandler handler(rules.json_field);
  if (!json::sax_parse(line.begin(), line.end(), &handler)) {
    CISTRON_THROW(kBadInput, "{}: malformed JSON: {}; correct the line", place, handler.problem);
  }
  if (handler.wrong_type) {
    CISTRON_THROW(kBadInput, "{}: field {} is not a string; correct it, or set data.json_field",
                  place, FieldName(rules));
  }
  if (!handler.found) {
    CISTRON_THROW(kBadInput,
                  "{}: no field {} (there are: {}); set data.json_field to the one to read", place,
                  FieldName(rules), handler.keys.empty() ? "none" : Printable(handler.keys));
  }
  const bool named_by_id = !handler.id.text.empty() || !handler.id.wrong_type.empty();
  LineHandler::NameField& name = named_by_id ? handler.id : handler.name;
  if (!name.wrong_type.empty()) {
    // Taken for nameless, records of one name could fall on both sides of a split.
    CISTRON_THROW(kBadInput,
                  "{}: field \"{}\" is {}; the name of a record is a string or a number: correct "
                  "it, or remove the field",
                  place, named_by_id ? "id" : "name", name.wrong_type);
  }
  return {std::move(handler.sequence), std::move(name.text)};
}

JsonlIndexer::JsonlIndexer(std::string file, const SequenceRules& rules)
    : file_(std::move(file)), rules_(rules) {}

void JsonlIndexer::Feed(std::string_view chunk) {
  while (!chunk.empty()) {
    const std::size_t newline = chunk.find('\n');
    const std::string_view piece = chunk.substr(0, newline);
    if (pending_.size() + piece.size() > kMaxJsonLine) {
      CISTRON_THROW(kBadInput,
                    "{}:{}: the line is longer than {} bytes; give long sequences as FASTA", file_,
                    line_ + 1, kMaxJsonLine);
    }
    if (newline == std::string_view::npos) {
      pending_ += piece;
      return;
    }
    if (pending_.empty()) {
      Line(piece);
    } else {
      pending_ += piece;
      const std::string whole = std::exchange(pending_, {});
      Line(whole);
    }
    chunk.remove_prefix(newline + 1);
  }
}

void JsonlIndexer::Line(std::string_view line) {
  const std::int64_t start = offset_;
  offset_ += static_cast<std::int64_t>(line.size()) + 1;
  ++line_;
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.find_first_not_of(" \t") == std::string_view::npos) return;
  const std::string place = fmt::format("{}:{}", file_, line_);
  const JsonRecord parsed = ParseJsonLine(line, rules_, place);
  const std::string& sequence = parsed.sequence;
  const std::string name =
      parsed.name.empty() ? fmt::format("#{}", index_.records.size()) : parsed.name;
  if (sequence.empty()) {
    CISTRON_THROW(kBadInput,
                  "{}: record '{}' has no sequence: the field {} is empty; remove the line", place,
                  Printable(name), FieldName(rules_));
  }
  // The bytes of an unescaped value stand in the line as they are; wherever they are found they are
  // the same bytes, so they can be read from there.
  const std::size_t at = line.find(sequence);
  Record record;
  record.header = start;
  record.line = line_;
  record.sequence = at == std::string_view::npos ? -1 : start + static_cast<std::int64_t>(at);
  record.length = static_cast<std::int64_t>(sequence.size());
  record.first_checkpoint = static_cast<std::int64_t>(index_.checkpoints.size());
  record.name_hash = HashName(name);
  TagState tag;
  const bool tags = !rules_.tag_delimiters.empty();
  const bool bytes = rules_.table->alphabet() == Alphabet::kBytes;
  for (std::size_t i = 0; i < sequence.size(); ++i) {
    const char c = sequence[i];
    const auto position = static_cast<std::int64_t>(i);
    if (position > 0 && position % kCheckpointBases == 0) {
      index_.checkpoints.push_back({record.sequence + position, tag.open});
    }
    const bool in_tag = tags && tag.Advance(rules_, c);
    std::uint8_t flags = rules_.table->flags(static_cast<unsigned char>(c));
    if (!bytes && (flags & kBlank)) flags |= kIllegal;
    if (c == '\0' || ((flags & kIllegal) && !in_tag)) {
      CISTRON_THROW(kBadInput, "{}: record '{}', position {} of the sequence: {}", place,
                    Printable(name), position + 1,
                    ExplainIllegalByte(rules_.table->alphabet(), static_cast<unsigned char>(c),
                                       std::string_view(sequence).substr(i < 32 ? 0 : i - 32, 64)));
    }
  }
  if (tag.open != 0) {
    CISTRON_THROW(kBadInput, "{}: record '{}': a tag opened by '{}' is never closed", place,
                  Printable(name), rules_.tag_delimiters[tag.open - 1u]);
  }
  index_.records.push_back(record);
}

SequenceIndex JsonlIndexer::Finish() {
  if (!pending_.empty()) {
    const std::string last = std::exchange(pending_, {});
    Line(last);
  }
  if (index_.records.empty()) {
    CISTRON_THROW(kBadInput, "{}: holds no record; give one JSON object a line", file_);
  }
  index_.records.shrink_to_fit();
  index_.checkpoints.shrink_to_fit();
  return std::move(index_);
}

}  // namespace cistron::data
