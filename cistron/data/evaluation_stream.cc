#include <algorithm>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/data/batch_builder.h"
#include "cistron/data/corpus_impl.h"
#include "cistron/data/stream.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::data {

struct EvaluationStream::Impl {
  std::shared_ptr<const Corpus> corpus;
  std::vector<Segment> storage;  // for Part::kAll
  const std::vector<Segment>* segments = nullptr;
  std::vector<std::int64_t> first_row;  // of each segment, and the total

  struct Place {
    const Segment* segment;
    std::int64_t start, length;
  };
  Place At(std::int64_t row) const {
    CISTRON_CHECK(row >= 0 && row < first_row.back(), "EvaluationStream: row {} is not in [0, {})",
                  row, first_row.back());
    const auto s = static_cast<std::size_t>(
        std::upper_bound(first_row.begin(), first_row.end(), row) - first_row.begin() - 1);
    const Segment& segment = (*segments)[s];
    const std::int64_t length = corpus->config().seq_len;
    const std::int64_t start = (row - first_row[s]) * length;
    return {&segment, start, std::min(length, segment.tokens() - start)};
  }
};

EvaluationStream::EvaluationStream(std::shared_ptr<const Corpus> corpus, Part part)
    : impl_(std::make_unique<Impl>()) {
  impl_->corpus = std::move(corpus);
  const Corpus::Impl& data = impl_->corpus->impl();
  impl_->segments = &data.Segments(part, impl_->storage);
  const std::int64_t length = data.config.seq_len;
  impl_->first_row.push_back(0);
  for (const Segment& segment : *impl_->segments) {
    const std::int64_t n = segment.tokens();
    impl_->first_row.push_back(impl_->first_row.back() + n / length + (n % length >= 2));
  }
  if (num_rows() == 0) {
    CISTRON_THROW(
        kBadInput, "data: the part to evaluate holds no window; {}",
        part == Part::kHeldout ? "hold something out with data.split" : "give longer records");
  }
  if (part == Part::kHeldout && !AnyScored()) {
    CISTRON_THROW(kBadInput,
                  "data: the held-out part has no base to score: all are degenerate, in tags, or "
                  "the first of their window; lower data.train_fraction, hold out other data, or "
                  "set data.split=none");
  }
}

EvaluationStream::~EvaluationStream() = default;
EvaluationStream::EvaluationStream(EvaluationStream&&) noexcept = default;
EvaluationStream& EvaluationStream::operator=(EvaluationStream&&) noexcept = default;

std::int64_t EvaluationStream::num_rows() const {
  return impl_->first_row.back();
}

EvaluationRow EvaluationStream::Row(std::int64_t row) const {
  const Impl::Place place = impl_->At(row);
  const Segment& s = *place.segment;
  const std::int64_t first = impl_->corpus->impl().first_record[static_cast<std::size_t>(s.file)];
  const std::int64_t before = s.begin_token && place.start > 0 ? 1 : 0;
  return {first + s.record, s.begin + place.start - before, place.length};
}

bool EvaluationStream::AnyScored() const {
  for (std::int64_t row = 0; row < num_rows(); ++row) {
    const Batch batch = Rows(row, 1);
    for (const std::int64_t label : batch.labels.span<std::int64_t>()) {
      if (label != ops::kIgnoreLabel) return true;
    }
  }
  return false;
}

Batch EvaluationStream::Rows(std::int64_t begin, std::int64_t count) const {
  CISTRON_CHECK(begin >= 0 && count >= 1 && begin <= num_rows() - count,
                "EvaluationStream::Rows: rows [{}, {}) of {}", begin, begin + count, num_rows());
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < count; ++i) tokens += impl_->At(begin + i).length;
  BatchBuilder builder(tokens);
  const Corpus::Impl& data = impl_->corpus->impl();
  WindowTokens window;
  for (std::int64_t i = 0; i < count; ++i) {
    const Impl::Place place = impl_->At(begin + i);
    data.ReadWindow(*place.segment, place.start, place.length, false, window);
    for (std::size_t t = 0; t < window.tokens.size(); ++t) {
      // Soft-masked bases are scored in full, special tokens not at all; nor is the base after a
      // begin token, the window's first.
      float& weight = window.label_weights[t];
      const std::int64_t token = window.tokens[t];
      const bool special = token == kBeginToken || token == kEndToken;
      const bool first_base = t == 1 && window.tokens[0] == kBeginToken;
      weight = !special && !first_base && window.scored[t] ? 1.0f : 0.0f;
    }
    builder.Append(window.tokens, window.label_weights);
  }
  BatchTotals ignored;
  return builder.Finish(ignored);
}

}  // namespace cistron::data
