// How the values of a configuration must fit together.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/train/run_config.h"

namespace cistron::train {
namespace {

void CheckSupported(const LoadedConfig& loaded) {
  const RunConfig& c = loaded.config;
  if (c.device != DeviceChoice::kCpu) {
    CISTRON_THROW(kUnsupported, "{}: this version runs on device=cpu only", loaded.Where("device"));
  }
  if (c.precision != Precision::kFp32 && c.precision != Precision::kBf16) {
    CISTRON_THROW(kUnsupported,
                  "{}: this version trains in precision=fp32 or bf16 only; the FP8 and "
                  "MXFP8 recipes are not in it",
                  loaded.Where("precision"));
  }
  for (const auto& [key, value] :
       {std::pair{"parallel.dp", c.parallel.dp}, std::pair{"parallel.ep", c.parallel.ep}}) {
    if (value != 1) {
      CISTRON_THROW(kUnsupported, "{}: {} ranks; this version runs on one rank, {}=1",
                    loaded.Where(key), value, key);
    }
  }
}

void CheckModel(const LoadedConfig& loaded) {
  const model::MixtralConfig& m = loaded.config.model;
  if (m.num_experts_per_tok > m.num_local_experts) {
    CISTRON_THROW(kBadInput,
                  "{}: each token would use {} of {} experts; lower "
                  "model.num_experts_per_tok or raise model.num_local_experts",
                  loaded.Where("model.num_experts_per_tok"), m.num_experts_per_tok,
                  m.num_local_experts);
  }
  if (!m.head_dim && m.hidden_size % m.num_attention_heads != 0) {
    CISTRON_THROW(kBadInput,
                  "{}: hidden size {} is not divisible by {} heads; change one, or set "
                  "model.head_dim",
                  loaded.Where("model.hidden_size"), m.hidden_size, m.num_attention_heads);
  }
  if (m.HeadDim() % 2 != 0) {
    CISTRON_THROW(kBadInput,
                  "{}: head width {} is odd; rotary embedding turns pairs, so it must be "
                  "even",
                  loaded.Where("model.head_dim"), m.HeadDim());
  }
  if (m.num_attention_heads % m.num_key_value_heads != 0) {
    CISTRON_THROW(kBadInput,
                  "{}: {} query heads cannot share {} key-value heads evenly; one must "
                  "divide the other",
                  loaded.Where("model.num_key_value_heads"), m.num_attention_heads,
                  m.num_key_value_heads);
  }
  // Token ids are the bytes of the sequence: ASCII for letters, anything for bytes.
  const bool bytes = loaded.config.data.alphabet == data::Alphabet::kBytes;
  const std::int64_t ids = bytes ? 256 : 128;
  if (m.vocab_size < ids) {
    CISTRON_THROW(kBadInput,
                  "{}: vocabulary {} is too small; token ids are byte values, so it must "
                  "be at least {}",
                  loaded.Where("model.vocab_size"), m.vocab_size, ids);
  }
}

void CheckData(const LoadedConfig& loaded) {
  const RunConfig& c = loaded.config;
  if (c.data.train.empty()) {
    CISTRON_THROW(kBadInput,
                  "data.train names no file; give data.train=FILE or "
                  "data.train=[FILE, FILE]");
  }
  if (!c.data_weights.empty() && c.data_weights.size() != c.data.train.size()) {
    CISTRON_THROW(kBadInput, "{}: {} mixing weights for {} files of data.train",
                  loaded.Where("data.weights"), c.data_weights.size(), c.data.train.size());
  }
  const bool by_files = c.data.split.kind == data::SplitRule::Kind::kFiles;
  if (by_files && c.data.heldout.empty()) {
    CISTRON_THROW(kBadInput,
                  "{}: data.split=files holds out the files of data.heldout, which names "
                  "none",
                  loaded.Where("data.split"));
  }
  if (!by_files && !c.data.heldout.empty()) {
    CISTRON_THROW(kBadInput, "{}: files are held out only with data.split=files",
                  loaded.Where("data.heldout"));
  }
}

void CheckBatch(const LoadedConfig& loaded) {
  const RunConfig& c = loaded.config;
  const std::int64_t row = c.data.seq_len;
  for (const auto& [key, tokens] : {std::pair{"batch.global_tokens", c.batch.global_tokens},
                                    std::pair{"batch.micro_tokens", c.batch.micro_tokens}}) {
    if (tokens % row != 0) {
      CISTRON_THROW(kBadInput,
                    "{}: {} tokens are not whole rows of data.seq_len={} tokens; the "
                    "nearest is {}",
                    loaded.Where(key), tokens, row,
                    std::max<std::int64_t>(1, (tokens + row / 2) / row) * row);
    }
  }
  if (c.batch.micro_tokens > c.batch.global_tokens) {
    CISTRON_THROW(kBadInput, "{}: a micro-batch of {} tokens is larger than the global batch of {}",
                  loaded.Where("batch.micro_tokens"), c.batch.micro_tokens, c.batch.global_tokens);
  }
}

void CheckSchedule(const LoadedConfig& loaded) {
  const Schedule s = loaded.config.MakeSchedule();
  if (s.warmup_steps > s.decay_end) {
    CISTRON_THROW(kBadInput, "{}: a warm-up of {} updates does not end before the decay ends at {}",
                  loaded.Where("optim.warmup_steps"), s.warmup_steps, s.decay_end);
  }
}

}  // namespace

void CheckRunConfig(const LoadedConfig& loaded) {
  CheckSupported(loaded);
  CheckModel(loaded);
  CheckData(loaded);
  CheckBatch(loaded);
  CheckSchedule(loaded);
  if (loaded.config.output.empty()) {
    CISTRON_THROW(kBadInput, "output names no directory; give output=DIRECTORY");
  }
}

}  // namespace cistron::train
