// cistron score: a table with one line for each record of FASTA files.
#include <fmt/format.h>

#include <cstdio>

#include "apps/cistron/commands.h"
#include "apps/cistron/evaluation_options.h"
#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/io/file.h"
#include "cistron/train/score.h"

namespace cistron::app {
namespace {

class ScoreCommand final : public Command {
 public:
  std::string name() const override { return "score"; }
  std::string summary() const override {
    return "a table of loss and bits per base, one record a line";
  }
  std::string footer() const override {
    return "Tab-separated: file, record, length, bases (scored), loss (nats a base), perplexity,\n"
           "bits_per_base; NA where a record has nothing to score. Bases are residues for "
           "protein,\n"
           "bytes for bytes. Rules as in `cistron eval`. Control bytes and backslashes in names "
           "are\n"
           "written \\xNN.\n"
           "--data is required.\n"
           "Examples:\n"
           "  cistron score runs/L0_sanity/final --data genes.fa\n"
           "  cistron score runs/L0_sanity --data genes.fa.gz --output scores.tsv";
  }
  void Declare(Options& options) override {
    evaluation_.Declare(options);
    options.Option("--output", output_, "file to write; empty: standard output");
  }

  int Run() override {
    if (evaluation_.files().empty()) {
      CISTRON_THROW(kBadInput,
                    "score: give --data FILE; the held-out part of a run is evaluated by `cistron "
                    "eval {}`",
                    evaluation_.model_path());
    }
    if (!output_.empty()) io::CheckOutputFile(output_);
    evaluation_.Prepare();
    const auto m = evaluation_.Load();
    const quant::Autocast recipe = evaluation_.Recipe();
    std::string table = fmt::format("file\trecord\tlength\t{0}s\tloss\tperplexity\tbits_per_{0}\n",
                                    evaluation_.unit());
    for (const std::string& file : evaluation_.files()) {
      const auto corpus = evaluation_.OpenFile(file);
      const data::EvaluationStream stream(corpus, data::Part::kAll);
      train::ScoreRecords(m->model, *corpus, stream, evaluation_.batch_tokens(),
                          [&](std::int64_t index, const train::EvaluationResult& r) {
                            const data::RecordInfo info = corpus->record(index);
                            table += fmt::format("{}\t{}\t{}\t{}\t{}\n", EscapedField(file),
                                                 EscapedField(info.name), info.length, r.bases,
                                                 Columns(r));
                            if (output_.empty()) Flush(table);
                          });
    }
    if (output_.empty()) {
      Flush(table);
    } else {
      io::WriteFileAtomically(output_, table);
    }
    return kOk;
  }

 private:
  static void Flush(std::string& table) {
    std::fwrite(table.data(), 1, table.size(), stdout);
    table.clear();
  }

  EvaluationOptions evaluation_;
  std::string output_;
};

}  // namespace

std::unique_ptr<Command> MakeScoreCommand() {
  return std::make_unique<ScoreCommand>();
}

}  // namespace cistron::app
