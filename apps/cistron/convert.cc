// cistron convert: Hugging Face directories and checkpoints, either into either.
#include <fmt/format.h>

#include "apps/cistron/commands.h"
#include "cistron/base/error.h"
#include "cistron/train/model_source.h"
#include "cistron/train/training_state.h"

namespace cistron::app {
namespace {

class ConvertCommand final : public Command {
 public:
  std::string name() const override { return "convert"; }
  std::string summary() const override { return "Hugging Face directory to checkpoint, and back"; }
  std::string footer() const override {
    return "SRC is a Hugging Face directory (one file or shards, one tensor an expert or stacked\n"
           "experts), a checkpoint or a run directory. DST must not exist. Every tensor of SRC is\n"
           "accounted for; one that the model does not have, or lacks, is an error.\n"
           "Examples:\n"
           "  cistron convert runs/L0_sanity/checkpoints/step-00001200 my_model\n"
           "  cistron convert mixtral_hf ckpt                      (ckpt/step-00000000)\n"
           "  cistron convert mixtral_hf mixtral_stacked --to huggingface --layout stacked\n"
           "  cistron convert runs/L0_sanity half --dtype bfloat16";
  }
  void Declare(Options& options) override {
    options.Positional("SRC", source_, "model to read");
    options.Positional("DST", target_, "directory to write");
    options.Choice("--to", to_, {"", "huggingface", "checkpoint"},
                   "empty: the other kind; with a run directory or an option below, huggingface");
    options.Choice("--layout", layout_, {"", "published", "stacked"},
                   "one tensor an expert as in the published Mixtral, or stacked experts");
    options.Choice("--dtype", dtype_, {"", "float32", "bfloat16", "float16"},
                   "of the Hugging Face weights; empty: as the source");
    options.Option("--max-shard-gib", max_shard_gib_, "largest Hugging Face weight file; 0: 5");
  }

  int Run() override {
    const train::ModelSource source = train::FindModel(source_);
    if (std::filesystem::exists(target_)) {
      CISTRON_THROW(kAlreadyExists, "{}: exists already; give another directory", target_);
    }
    if (!(max_shard_gib_ >= 0)) {
      CISTRON_THROW(kInvalidArgument, "--max-shard-gib={}: is negative", max_shard_gib_);
    }
    const bool asks_hugging_face = !layout_.empty() || !dtype_.empty() || max_shard_gib_ > 0;
    if (to_ == "checkpoint" && asks_hugging_face) {
      CISTRON_THROW(kInvalidArgument,
                    "--layout, --dtype and --max-shard-gib are for --to huggingface");
    }
    const bool to_checkpoint =
        to_ == "checkpoint" ||
        (to_.empty() && !asks_hugging_face && source.kind == train::ModelKind::kHuggingFace &&
         source.path == std::filesystem::path(source_));
    const model::HuggingFaceModel m = train::ReadModel(source);
    try {
      Write(m, source, to_checkpoint);
    } catch (...) {
      // It did not exist before: a half of it would stand in the way of the next try.
      std::error_code ignored;
      std::filesystem::remove_all(target_, ignored);
      throw;
    }
    return kOk;
  }

 private:
  void Write(const model::HuggingFaceModel& m, const train::ModelSource& source,
             bool to_checkpoint) const {
    if (to_checkpoint) {
      fmt::print("{}\n", train::SaveWeights(target_, m).string());
      return;
    }
    model::ExportOptions options;
    options.layout =
        layout_ == "stacked" ? model::ExpertLayout::kStacked : model::ExpertLayout::kPublished;
    const std::string dtype = dtype_.empty() ? m.dtype : dtype_;
    options.dtype = dtype == "bfloat16"  ? DType::kBF16
                    : dtype == "float16" ? DType::kF16
                                         : DType::kF32;
    if (max_shard_gib_ > 0) {
      options.max_shard_bytes = static_cast<std::int64_t>(max_shard_gib_ * (1 << 30));
    }
    if (source.kind == train::ModelKind::kHuggingFace) options.tokenizer_from = source.path;
    model::SaveHuggingFace(target_, m.config, m.tensors, options);
    fmt::print("{}\n", target_);
  }

  std::string source_, target_, to_, layout_, dtype_;
  double max_shard_gib_ = 0;
};

}  // namespace

std::unique_ptr<Command> MakeConvertCommand() {
  return std::make_unique<ConvertCommand>();
}

}  // namespace cistron::app
