// cistron eval: how well a model predicts files, or the held-out part of its own run.
#include <fmt/format.h>

#include <optional>

#include "apps/cistron/commands.h"
#include "apps/cistron/evaluation_options.h"
#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/data/stream.h"
#include "cistron/train/evaluate.h"
#include "cistron/train/run_directory.h"

namespace cistron::app {
namespace {

class EvalCommand final : public Command {
 public:
  std::string name() const override { return "eval"; }
  std::string summary() const override {
    return "loss, perplexity and bits per base of a model on files";
  }
  std::string footer() const override {
    return "MODEL is a Hugging Face directory, a checkpoint or a run directory. Windows do not "
           "overlap,\n"
           "forward strand; the first base of each and degenerate bases are not scored. The loss "
           "is a\n"
           "mean over bases, in nats. Prints a tab-separated line a file and one for all; NA "
           "where\n"
           "nothing can be scored.\n"
           "With --precision mxfp8, fp8_block, fp8_current the products of the layers follow the "
           "recipe;\n"
           "fp8_delayed takes its scales from a checkpoint of such a run. Under fp8_current a "
           "scale "
           "spans\n"
           "the --batch-tokens computed at once, so the loss depends on them.\n"
           "Examples:\n"
           "  cistron eval runs/L0_sanity                   (the held-out part of the run)\n"
           "  cistron eval runs/mx/checkpoints/step-00001000 --precision mxfp8   (as the run "
           "itself)\n"
           "  cistron eval runs/L0_sanity/final --data genome.fa.gz plasmid.fa\n"
           "  cistron eval MODEL --data genome.fa --seq-len 256 --alphabet dna";
  }
  void Declare(Options& options) override { evaluation_.Declare(options); }

  int Run() override {
    evaluation_.Prepare();
    const std::string option = evaluation_.FileOption();
    if (evaluation_.files().empty() && !option.empty()) {
      CISTRON_THROW(kInvalidArgument,
                    "{}: the held-out part of a run is read as the run was; the option is for "
                    "--data FILE",
                    option);
    }
    // What can be wrong is found before a line is printed.
    const std::optional<data::DataConfig> heldout =
        evaluation_.files().empty() ? std::optional(HeldoutOfRun()) : std::nullopt;
    const auto m = evaluation_.Load();
    const quant::Autocast recipe = evaluation_.Recipe();
    if (heldout) {
      const data::EvaluationStream stream(data::Corpus::Open(*heldout));
      Line("held-out",
           train::Evaluate(m->model, stream, heldout->seq_len, 0, evaluation_.batch_tokens()));
      return kOk;
    }
    train::EvaluationResult all;
    for (const std::string& file : evaluation_.files()) {
      const data::EvaluationStream stream(evaluation_.OpenFile(file), data::Part::kAll);
      const train::EvaluationResult result = train::Evaluate(
          m->model, stream, evaluation_.rules().seq_len, 0, evaluation_.batch_tokens());
      Line(file, result);
      all += result;
    }
    if (evaluation_.files().size() > 1) Line("all", all);
    return kOk;
  }

 private:
  void Line(const std::string& what, const train::EvaluationResult& r) {
    if (!headed_) {
      fmt::print("file\t{0}s\tloss\tperplexity\tbits_per_{0}\n", evaluation_.unit());
      headed_ = true;
    }
    fmt::print("{}\t{}\t{}\n", EscapedField(what), r.bases, Columns(r));
  }

  // The run directory given, or that in which the checkpoint given lies.
  train::RunPaths RunOfModel() const {
    const std::filesystem::path path = std::filesystem::canonical(evaluation_.model_path());
    const train::RunPaths above{path.parent_path().parent_path()};
    return path.parent_path() == above.checkpoints() ? above : train::RunPaths{path};
  }

  data::DataConfig HeldoutOfRun() const {
    const train::RunPaths run = RunOfModel();
    if (!std::filesystem::exists(run.config())) {
      CISTRON_THROW(kBadInput,
                    "{}: only a run directory, and a checkpoint in one, has held-out data of its "
                    "own; give --data FILE",
                    evaluation_.model_path());
    }
    data::DataConfig data = train::LoadRunConfig(run.config(), {}).config.data;
    data.seq_len = evaluation_.rules().seq_len;
    data.stride = 0;  // of training windows, which are not read here
    return data;
  }

  EvaluationOptions evaluation_;
  bool headed_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeEvalCommand() {
  return std::make_unique<EvalCommand>();
}

}  // namespace cistron::app
