#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/data/batch_builder.h"
#include "cistron/data/corpus_impl.h"
#include "cistron/data/permutation.h"
#include "cistron/data/stream.h"

namespace cistron::data {
namespace {

std::uint64_t Key(std::uint64_t seed, std::string_view name, std::uint64_t a, std::uint64_t b = 0) {
  return Mix64(Mix64(Mix64(Mix64(seed) ^ HashName(name)) ^ a) ^ b);
}

// Whether any token but the first of its segment has weight as a label. Reads up to the first.
bool HasLabel(const Corpus::Impl& data) {
  WindowTokens window;
  for (const Segment& segment : data.train) {
    const std::int64_t n = segment.tokens();
    for (std::int64_t start = 0; start < n; start += kCheckpointBases) {
      data.ReadWindow(segment, start, std::min(kCheckpointBases, n - start), false, window);
      const auto labels = window.label_weights.begin() + (start == 0 ? 1 : 0);
      if (std::any_of(labels, window.label_weights.end(), [](float w) { return w > 0; })) {
        return true;
      }
    }
  }
  return false;
}

// Of all windows of the training part.
WindowLengths LengthsOf(const Corpus::Impl& data) {
  WindowLengthSums sums;
  for (const FileWindows& file : data.train_files) {
    for (std::size_t i = file.begin; i < file.end; ++i) {
      const std::int64_t n = data.train[i].tokens();
      sums.Add(data.grid.Length(n), file.weight * static_cast<double>(data.grid.Count(n)));
    }
  }
  return sums.Lengths();
}

}  // namespace

struct TrainingStream::Impl {
  // A window of an epoch: tokens [start, start + length) of a segment.
  struct Window {
    std::size_t segment = 0;
    std::int64_t start = 0, length = 0;
    bool reverse = false;
  };
  // The draws that the files give to an epoch.
  struct Epoch {
    std::int64_t number = -1;
    std::vector<std::int64_t> first_draw;    // of each file
    std::vector<std::int64_t> first_global;  // of each file, and the total
  };

  Impl(std::shared_ptr<const Corpus> c, std::uint64_t s, std::int64_t tokens)
      : corpus(std::move(c)), seed(s), global_tokens(tokens), windows(LengthsOf(data())) {}

  const Corpus::Impl& data() const { return corpus->impl(); }

  Epoch MakeEpoch(std::int64_t number) const;
  void EnterEpoch(std::int64_t number) {
    if (epoch.number != number) epoch = MakeEpoch(number);
  }
  // Position p of the present epoch.
  Window At(std::int64_t p) const;
  // Moves to the next window that exists and loads it.
  void Load();

  std::shared_ptr<const Corpus> corpus;
  std::uint64_t seed;
  std::int64_t global_tokens;
  WindowLengths windows;
  StreamState state;
  Epoch epoch;

  // The window that is being read.
  std::int64_t loaded_epoch = -1, loaded_window = -1;
  WindowTokens loaded;
};

TrainingStream::Impl::Epoch TrainingStream::Impl::MakeEpoch(std::int64_t number) const {
  Epoch e;
  e.number = number;
  e.first_global.push_back(0);
  for (const FileWindows& file : data().train_files) {
    const double rate = file.weight * static_cast<double>(file.windows);
    const auto draws = [&](std::int64_t epochs) {
      return static_cast<std::int64_t>(std::floor(static_cast<double>(epochs) * rate));
    };
    e.first_draw.push_back(draws(number));
    e.first_global.push_back(e.first_global.back() + draws(number + 1) - draws(number));
  }
  return e;
}

TrainingStream::Impl::Window TrainingStream::Impl::At(std::int64_t p) const {
  const std::int64_t total = epoch.first_global.back();
  const auto number = static_cast<std::uint64_t>(epoch.number);
  const std::int64_t global = KeyedPermutation(Key(seed, "data.order", number), total)(p);
  const auto f = static_cast<std::size_t>(
      std::upper_bound(epoch.first_global.begin(), epoch.first_global.end(), global) -
      epoch.first_global.begin() - 1);
  const FileWindows& file = data().train_files[f];
  const std::int64_t draw = epoch.first_draw[f] + global - epoch.first_global[f];
  const auto pass = static_cast<std::uint64_t>(draw / file.windows);
  const std::int64_t window =
      KeyedPermutation(Key(seed, "data.file", f, pass), file.windows)(draw % file.windows);

  const auto begin = data().train.begin() + static_cast<std::ptrdiff_t>(file.begin);
  const auto end = data().train.begin() + static_cast<std::ptrdiff_t>(file.end);
  const auto segment =
      std::upper_bound(begin, end, window,
                       [](std::int64_t w, const Segment& s) { return w < s.first_window; }) -
      1;
  const auto index = static_cast<std::size_t>(segment - data().train.begin());
  const std::int64_t n = segment->tokens();
  const auto slack = static_cast<std::uint64_t>(data().grid.Slack(n));
  const auto phase =
      static_cast<std::int64_t>(RandomStream(seed, "data.phase", pass).Below(index, slack + 1));
  Window w;
  w.segment = index;
  w.start = data().grid.Start(n, window - segment->first_window, phase);
  w.length = data().grid.Length(n);
  w.reverse =
      data().rules.table->HasComplement() &&
      RandomStream(seed, "data.reverse_complement", number)
              .Uniform(static_cast<std::uint64_t>(global)) < data().config.reverse_complement;
  return w;
}

void TrainingStream::Impl::Load() {
  EnterEpoch(state.epoch);
  while (state.window >= epoch.first_global.back()) {
    ++state.epoch;
    state.window = 0;
    EnterEpoch(state.epoch);
  }
  if (loaded_epoch == state.epoch && loaded_window == state.window) return;
  const Window w = At(state.window);
  data().ReadWindow(data().train[w.segment], w.start, w.length, w.reverse, loaded);
  loaded_epoch = state.epoch;
  loaded_window = state.window;
}

TrainingStream::TrainingStream(std::shared_ptr<const Corpus> corpus, std::uint64_t seed,
                               std::int64_t global_tokens)
    : impl_(std::make_unique<Impl>(std::move(corpus), seed, global_tokens)) {
  const std::int64_t length = impl_->data().config.seq_len;
  CISTRON_CHECK(global_tokens > 0 && global_tokens % length == 0,
                "batch.global_tokens = {} is not a positive multiple of data.seq_len = {}",
                global_tokens, length);
  CISTRON_CHECK(
      static_cast<double>(global_tokens) <= tokens_per_epoch(),
      "batch.global_tokens = {} is more than the training data hold: an epoch has {:.0f} tokens; "
      "lower it, or add data",
      global_tokens, tokens_per_epoch());
  if (!HasLabel(impl_->data())) {
    CISTRON_THROW(
        kBadInput,
        "data.train: no base has weight as a label: all are degenerate, in tags, or lower "
        "case with data.soft_mask_weight = {}",
        impl_->data().config.soft_mask_weight);
  }
}

TrainingStream::~TrainingStream() = default;
TrainingStream::TrainingStream(TrainingStream&&) noexcept = default;
TrainingStream& TrainingStream::operator=(TrainingStream&&) noexcept = default;

GlobalBatch TrainingStream::Next() {
  GlobalBatch batch;
  batch.seq_len = impl_->data().config.seq_len;
  batch.windows = impl_->windows;
  StreamState& state = impl_->state;
  for (std::int64_t row = 0; row < impl_->global_tokens / batch.seq_len; ++row) {
    BatchBuilder builder(batch.seq_len);
    while (builder.remaining() > 0) {
      impl_->Load();
      const std::span<const std::int64_t> tokens = impl_->loaded.tokens;
      const std::span<const float> weights = impl_->loaded.label_weights;
      const auto offset = static_cast<std::size_t>(state.offset);
      const std::size_t n =
          std::min(tokens.size() - offset, static_cast<std::size_t>(builder.remaining()));
      builder.Append(tokens.subspan(offset, n), weights.subspan(offset, n));
      state.offset += static_cast<std::int64_t>(n);
      if (offset + n == tokens.size()) {
        ++state.window;
        state.offset = 0;
      }
    }
    batch.rows.push_back(builder.Finish(batch.totals));
  }
  ++state.step;
  return batch;
}

StreamState TrainingStream::state() const {
  return impl_->state;
}

void TrainingStream::Restore(const StreamState& state) {
  CISTRON_CHECK(state.step >= 0 && state.epoch >= 0 && state.window >= 0 && state.offset >= 0,
                "TrainingStream::Restore: negative state (step {}, epoch {}, window {}, offset {})",
                state.step, state.epoch, state.window, state.offset);
  const std::int64_t windows = windows_in_epoch(state.epoch);
  CISTRON_CHECK(
      state.window <= windows && (state.window < windows || state.offset == 0),
      "TrainingStream::Restore: window {} of an epoch of {}: the state belongs to other data",
      state.window, windows);
  if (state.offset > 0) {
    impl_->EnterEpoch(state.epoch);
    const std::int64_t length = impl_->At(state.window).length;
    CISTRON_CHECK(
        state.offset < length,
        "TrainingStream::Restore: offset {} in a window of {}: the state belongs to other data",
        state.offset, length);
  }
  impl_->state = state;
}

const WindowLengths& TrainingStream::window_lengths() const {
  return impl_->windows;
}

std::int64_t TrainingStream::windows_in_epoch(std::int64_t epoch) const {
  return impl_->MakeEpoch(epoch).first_global.back();
}

double TrainingStream::tokens_per_epoch() const {
  double tokens = 0;
  for (const FileWindows& file : impl_->data().train_files) {
    tokens += file.weight * static_cast<double>(file.tokens);
  }
  return tokens;
}

}  // namespace cistron::data
