#include "cistron/data/corpus.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/data/corpus_impl.h"

namespace cistron::data {
namespace {

void CheckConfig(const DataConfig& c) {
  CISTRON_CHECK(!c.train.empty(), "data.train names no file; give at least one");
  CISTRON_CHECK(c.seq_len >= 2, "data.seq_len = {}: a window needs at least 2 tokens", c.seq_len);
  CISTRON_CHECK(
      c.stride >= 0 && c.stride <= c.seq_len,
      "data.stride = {} is not in [1, data.seq_len = {}], nor 0, which stands for seq_len: "
      "a larger one would leave bases between windows unread",
      c.stride, c.seq_len);
  CISTRON_CHECK(c.reverse_complement >= 0 && c.reverse_complement <= 1,
                "data.reverse_complement = {} is not a probability in [0, 1]",
                c.reverse_complement);
  CISTRON_CHECK(c.soft_mask_weight >= 0 && std::isfinite(c.soft_mask_weight),
                "data.soft_mask_weight = {} is not a weight ≥ 0", c.soft_mask_weight);
  CISTRON_CHECK(c.split.train_fraction >= 0 && c.split.train_fraction <= 1,
                "data.train_fraction = {} is not in [0, 1]", c.split.train_fraction);
  for (const FileSpec& file : c.train) {
    CISTRON_CHECK(file.weight > 0 && file.weight <= 1e6,
                  "data.train: weight {} of {} is not in (0, 1e6]; leave the file out instead of 0",
                  file.weight, file.path.string());
  }
  for (const std::string& delimiter : c.tag_delimiters) {
    CISTRON_CHECK(delimiter.size() == 1 && delimiter[0] != '\n' && delimiter[0] != '\0',
                  "data.tag_delimiters: '{}' is not one byte", delimiter);
    CISTRON_CHECK(c.alphabet == Alphabet::kBytes ||
                      (ByteTable::Of(c.alphabet).flags(static_cast<unsigned char>(delimiter[0])) &
                       kIllegal) != 0,
                  "data.tag_delimiters: '{}' is a letter of the alphabet '{}'", delimiter,
                  AlphabetName(c.alphabet));
  }
  CISTRON_CHECK(c.tag_delimiters.size() < 100, "data.tag_delimiters: {} are too many",
                c.tag_delimiters.size());
  const bool by_files = c.split.kind == SplitRule::Kind::kFiles;
  CISTRON_CHECK(by_files || c.heldout.empty(),
                "data.heldout names files, but data.split is not 'files'; set it, or remove them");
  for (const FileSpec& heldout : c.heldout) {
    for (const FileSpec& file : c.train) {
      std::error_code missing;  // is reported when the file is opened
      CISTRON_CHECK(!std::filesystem::equivalent(heldout.path, file.path, missing),
                    "data.heldout: {} is in data.train too; a file is on one side",
                    heldout.path.string());
    }
  }
  CISTRON_CHECK(!by_files || !c.heldout.empty(),
                "data.split=files, but data.heldout names no file");
}

// A copy of a training file, packed or not, is no held-out file.
void CheckHeldoutFiles(const Corpus::Impl& impl) {
  const std::size_t train = impl.config.train.size();
  for (std::size_t h = train; h < impl.files.size(); ++h) {
    for (std::size_t t = 0; t < train; ++t) {
      if (impl.files[h]->content_hash() != impl.files[t]->content_hash()) continue;
      CISTRON_THROW(kBadInput,
                    "data.heldout: {} has the content of {}, which is in data.train; what is held "
                    "out must not be trained on",
                    impl.files[h]->name(), impl.files[t]->name());
    }
  }
}

std::uint64_t Fingerprint(const Corpus::Impl& impl) {
  const DataConfig& c = impl.config;
  std::string text = fmt::format(
      "{} {} {} {} {} {} {} {} {} {} {} {} {}", AlphabetName(c.alphabet),
      static_cast<int>(c.split.kind), c.split.train_fraction, c.split.key, impl.grid.length,
      impl.grid.stride, c.reverse_complement, c.upper_case, c.soft_mask_weight, c.begin_token,
      c.end_token, impl.rules.tag_delimiters, c.json_field);
  for (std::size_t i = 0; i < impl.files.size(); ++i) {
    text += fmt::format(" {:x}", impl.files[i]->content_hash());
    if (i < c.train.size()) text += fmt::format("*{}", c.train[i].weight);
  }
  return HashName(text);
}

}  // namespace

Corpus::Corpus(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Corpus::~Corpus() = default;

const DataConfig& Corpus::config() const {
  return impl_->config;
}
std::int64_t Corpus::train_bases() const {
  return impl_->train_bases;
}
std::int64_t Corpus::heldout_bases() const {
  return impl_->heldout_bases;
}
std::int64_t Corpus::num_records() const {
  return impl_->first_record.back();
}
std::uint64_t Corpus::fingerprint() const {
  return impl_->fingerprint;
}

std::shared_ptr<const Corpus> Corpus::Open(const DataConfig& config) {
  CheckConfig(config);
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->rules.table = &ByteTable::Of(config.alphabet);
  for (const std::string& delimiter : config.tag_delimiters)
    impl->rules.tag_delimiters += delimiter;
  impl->rules.json_field = config.json_field;
  impl->grid = {config.seq_len, config.stride > 0 ? config.stride : config.seq_len};
  const DecodeCacheOptions cache{config.cache_dir, config.cache_limit_bytes};
  for (const auto* list : {&config.train, &config.heldout}) {
    for (const FileSpec& spec : *list) {
      impl->files.push_back(SequenceFile::Open(spec.path, impl->rules, cache));
    }
  }
  CheckHeldoutFiles(*impl);

  const SplitRule& split = config.split;
  // Of 2^64 equal hashes, those below train.
  const double threshold = split.train_fraction * 0x1p64;
  impl->first_record.push_back(0);
  for (std::size_t f = 0; f < impl->files.size(); ++f) {
    const std::vector<Record>& records = impl->files[f]->records();
    const bool heldout_file = f >= config.train.size();
    for (std::size_t r = 0; r < records.size(); ++r) {
      const std::int64_t n = records[r].length;
      std::int64_t cut = heldout_file ? 0 : n;
      if (split.kind == SplitRule::Kind::kRegion) {
        cut = static_cast<std::int64_t>(std::floor(split.train_fraction * static_cast<double>(n)));
      } else if (split.kind == SplitRule::Kind::kRecords) {
        const std::uint64_t hash = Mix64(records[r].name_hash ^ Mix64(split.key));
        cut = static_cast<double>(hash) < threshold ? n : 0;
      }
      const auto add = [&](std::vector<Segment>& part, std::int64_t begin, std::int64_t end) {
        if (begin == end) return;
        part.push_back({static_cast<std::int64_t>(r), begin, end, static_cast<std::int32_t>(f),
                        config.begin_token && begin == 0, config.end_token && end == n, 0});
      };
      add(impl->train, 0, cut);
      add(impl->heldout, cut, n);
      impl->train_bases += cut;
      impl->heldout_bases += n - cut;
    }
    impl->first_record.push_back(impl->first_record.back() +
                                 static_cast<std::int64_t>(records.size()));
  }
  impl->train.shrink_to_fit();
  impl->heldout.shrink_to_fit();
  const std::string first = config.train[0].path.string();
  if (impl->train.empty()) {
    CISTRON_THROW(kBadInput, "data: nothing is left to train on in {}{}: raise data.train_fraction",
                  first, config.train.size() > 1 ? ", …" : "");
  }
  if (split.kind != SplitRule::Kind::kNone) {
    const bool any = std::any_of(impl->heldout.begin(), impl->heldout.end(),
                                 [](const Segment& s) { return s.tokens() >= 2; });
    if (!any) {
      CISTRON_THROW(kBadInput,
                    "data: the held-out part of {}{} holds no window ({} bases in all, no two in a "
                    "row): lower "
                    "data.train_fraction, or set data.split=none",
                    first, config.train.size() > 1 ? ", …" : "", impl->heldout_bases);
    }
  }
  for (std::size_t i = 0; i < impl->train.size(); ++i) {
    Segment& segment = impl->train[i];
    if (i == 0 || impl->train[i - 1].file != segment.file) {
      const double weight = config.train[static_cast<std::size_t>(segment.file)].weight;
      impl->train_files.push_back({i, i, 0, 0, weight});
    }
    FileWindows& file = impl->train_files.back();
    const std::int64_t n = segment.tokens(), windows = impl->grid.Count(n);
    segment.first_window = file.windows;
    file.windows += windows;
    file.tokens += windows * impl->grid.Length(n);
    file.end = i + 1;
  }
  impl->fingerprint = Fingerprint(*impl);
  return std::shared_ptr<const Corpus>(new Corpus(std::move(impl)));
}

RecordInfo Corpus::record(std::int64_t index) const {
  const std::vector<std::int64_t>& first = impl_->first_record;
  CISTRON_CHECK(index >= 0 && index < first.back(), "Corpus: record {} is not in [0, {})", index,
                first.back());
  const auto file = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), index) -
                                             first.begin() - 1);
  const SequenceFile& source = *impl_->files[file];
  const std::int64_t local = index - first[file];
  const Record& record = source.records()[static_cast<std::size_t>(local)];
  return {source.RecordName(local), source.name(), record.line, record.length};
}

const std::vector<Segment>& Corpus::Impl::Segments(Part part, std::vector<Segment>& storage) const {
  if (part == Part::kTrain) return train;
  if (part == Part::kHeldout) return heldout;
  storage.clear();
  for (std::size_t f = 0; f < files.size(); ++f) {
    const std::vector<Record>& records = files[f]->records();
    for (std::size_t r = 0; r < records.size(); ++r) {
      storage.push_back({static_cast<std::int64_t>(r), 0, records[r].length,
                         static_cast<std::int32_t>(f), config.begin_token, config.end_token, 0});
    }
  }
  return storage;
}

void Corpus::ForEachChunk(Part part, const ChunkFunction& chunk) const {
  constexpr std::int64_t kChunk = 1 << 20;
  const ByteTable& table = *impl_->rules.table;
  std::vector<Segment> storage;
  std::string bases;
  for (const Segment& segment : impl_->Segments(part, storage)) {
    for (std::int64_t at = segment.begin; at < segment.end; at += kChunk) {
      const std::int64_t n = std::min(kChunk, segment.end - at);
      impl_->files[static_cast<std::size_t>(segment.file)]->Read(segment.record, at, n, bases);
      if (impl_->config.upper_case) {
        for (char& c : bases) c = static_cast<char>(table.Upper(static_cast<unsigned char>(c)));
      }
      chunk(bases, at == segment.begin);
    }
  }
}

void Corpus::Impl::ReadWindow(const Segment& segment, std::int64_t start, std::int64_t count,
                              bool reverse, WindowTokens& out) const {
  const bool first = segment.begin_token && start == 0;
  const bool last = segment.end_token && start + count == segment.tokens();
  const std::int64_t begin = segment.begin + start - (segment.begin_token && !first);
  const std::int64_t n = count - first - last;
  std::string bases;
  TagState tag;
  const SequenceFile& file = *files[static_cast<std::size_t>(segment.file)];
  file.Read(segment.record, begin, n, bases, &tag);

  const ByteTable& table = *rules.table;
  const auto soft_mask = static_cast<float>(config.soft_mask_weight);
  const bool tags = !rules.tag_delimiters.empty();
  out.tokens.clear();
  out.label_weights.clear();
  out.scored.clear();
  if (first) {
    out.tokens.push_back(kBeginToken);
    out.label_weights.push_back(0);
    out.scored.push_back(0);
  }
  bool tagged = false;
  for (const char c : bases) {
    auto byte = static_cast<unsigned char>(c);
    const std::uint8_t flags = table.flags(byte);
    float weight = 1;
    bool scored = (flags & kDegenerate) == 0;
    if (tags && tag.Advance(rules, c)) {
      tagged = true;
      weight = 0;
      scored = false;
    } else {
      if (flags & kIllegal) {
        CISTRON_THROW(kBadInput, "{}: the file has changed since it was opened; start again",
                      file.name());
      }
      if (flags & kLowerCase) weight = soft_mask;
      if (flags & kDegenerate) weight = 0;
      if (config.upper_case) byte = table.Upper(byte);
    }
    out.tokens.push_back(byte);
    out.label_weights.push_back(weight);
    out.scored.push_back(scored);
  }
  if (last) {
    out.tokens.push_back(kEndToken);
    out.label_weights.push_back(1);
    out.scored.push_back(0);
  }
  if (!reverse || tagged) return;
  std::reverse(out.tokens.begin(), out.tokens.end());
  std::reverse(out.label_weights.begin(), out.label_weights.end());
  std::reverse(out.scored.begin(), out.scored.end());
  for (std::int64_t& token : out.tokens) {
    token = token == kBeginToken ? kEndToken
            : token == kEndToken ? kBeginToken
                                 : table.Complement(static_cast<unsigned char>(token));
  }
  // The special token that is now last is a label; the one that is now first is none.
  if (last) out.label_weights.front() = 0;
  if (first) out.label_weights.back() = 1;
}

}  // namespace cistron::data
