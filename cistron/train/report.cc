#include "cistron/train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "cistron/base/error.h"
#include "cistron/io/file.h"
#include "cistron/train/corpus_baseline.h"
#include "cistron/train/metrics.h"
#include "cistron/train/report_charts.h"
#include "cistron/train/svg_chart.h"

namespace cistron::train {
namespace {

// Widths at which charts are drawn; the page shows the one that fits (kPageCss).
constexpr ChartSize kWide{1080, 400}, kMiddle{540, 320}, kNarrow{340, 290};
constexpr ChartSize kMapMiddle{540, 420}, kMapNarrow{340, 420};
constexpr int kMapBinsMiddle = 96, kMapBinsNarrow = 48;

constexpr const char* kPageCss = R"css(
:root{color-scheme:light dark;--page:#f5f6f8;--line:#dfe3e8;--good:#0f6b3a;--bad:#a33a00}
@media(prefers-color-scheme:dark){:root{--page:#0e1116;--line:#2c333c;--good:#5fd38d;--bad:#ff9f5a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--fg);font:16px/1.5 system-ui,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:36px 0 4px}
h3{font-size:1rem;margin:0 0 8px}
p{margin:4px 0 12px;max-width:75ch}.muted{color:var(--muted)}
.verdict{font-size:1.1rem;margin-top:8px}.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:16px 0;padding:0;list-style:none}
.tiles li,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.tiles b{display:block;white-space:nowrap;font-size:1.35rem;font-variant-numeric:tabular-nums;line-height:1.25}
.tiles span{color:var(--muted);font-size:.85rem}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:14px;margin:12px 0}.card{margin:0}.hero{margin:12px 0}
.legend{max-width:340px;margin:4px 0}
.wide,.narrow{display:none}.only-wide{display:none}
@media(min-width:1000px){.has-wide .wide{display:block}.has-wide .middle{display:none}}
@media(max-width:999px){.grid{grid-template-columns:minmax(0,1fr)}}
@media(max-width:700px){.tiles{grid-template-columns:1fr 1fr}}
@media(max-width:560px){main{padding:16px 10px 40px}.card{padding:10px 8px}.middle{display:none}.narrow{display:block}
.tiles b{font-size:1.2rem}h1{font-size:1.35rem}}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 14px 3px 0;vertical-align:top;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right}
.scroll{overflow-x:auto}
pre{margin:8px 0;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:8px;overflow-x:auto;
font:.82rem/1.45 ui-monospace,"DejaVu Sans Mono",monospace}
details{margin:12px 0}summary{cursor:pointer;font-weight:600;padding:4px 0}
footer{margin-top:40px;color:var(--muted);font-size:.85rem}
)css";

std::string Duration(double seconds) {
  const auto s = static_cast<long>(std::lround(seconds));
  if (seconds < 100) return fmt::format("{:.1f} s", seconds);
  if (s < 7200) return fmt::format("{} min {:02d} s", s / 60, s % 60);
  return fmt::format("{} h {:02d} min", s / 3600, s / 60 % 60);
}

std::string Count(double n) {
  if (n >= 1e9) return fmt::format("{:.3g} G", n / 1e9);
  if (n >= 1e6) return fmt::format("{:.3g} M", n / 1e6);
  return internal::TickText(std::round(n), 1);
}

std::string Paragraph(const std::string& text, const char* css = "muted") {
  return fmt::format("<p class=\"{}\">{}</p>\n", css, EscapeXml(text));
}

class Page {
 public:
  explicit Page(const RunRecord& record)
      : record_(record), bits_(InBits(record)), unit_(data::UnitName(record.alphabet())) {}

  std::string Build() {
    Head();
    Tiles();
    Learning();
    Optimisation();
    Experts();
    Profile();
    Summary();
    out_ +=
        "<footer>Written by <code>cistron report</code>. Hover over a chart for its "
        "values.</footer>\n"
        "</main></body></html>\n";
    return std::move(out_);
  }

 private:
  double Last(double StepRecord::*member) const {
    for (auto step = record_.steps.rbegin(); step != record_.steps.rend(); ++step) {
      if (std::isfinite((*step).*member)) return (*step).*member;
    }
    return kMissing;
  }

  void Head() {
    const std::string name = EscapeXml(record_.name.empty() ? "run" : record_.name);
    out_ = fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
        "'unsafe-inline'\">\n"
        "<title>{0} – Cistron "
        "run</title>\n<style>{1}{2}</style></head>\n<body><main>\n<h1>{0}</h1>\n",
        name, ChartCss(), kPageCss);
    Verdict();
    if (record_.partial_last_line) {
      out_ += Paragraph(
          "The last line of metrics.jsonl was cut short, as by a crash, and is left out.");
    }
  }

  void Verdict() {
    const double last = LastHeldout(record_);
    const std::string unit = bits_ ? "bits per " + unit_ : "nats a token";
    if (!std::isfinite(last)) {
      out_ += Paragraph(record_.holds_out()
                            ? "No held-out value has been computed yet."
                            : "This run holds nothing out (data.split=none): nothing here says how "
                              "well it predicts sequences that it was not trained on.",
                        "verdict");
      return;
    }
    std::string text = fmt::format("Held-out part: <strong>{:.4f} {}</strong>", last, unit);
    if (HasBaseline()) {
      const MarkovScore& best = record_.baseline->Best();
      const double margin = best.bits_per_base - last;
      text += margin > 0
                  ? fmt::format(", <span class=\"good\">{:.4f} below the best Markov model</span>",
                                margin)
                  : fmt::format(", <span class=\"bad\">{:.4f} above the best Markov model</span>",
                                -margin);
      text += fmt::format(" ({}: {:.4f}; orders 0…{} fitted)", EscapeXml(Describe(best)),
                          best.bits_per_base, record_.baseline->MaxOrder());
    }
    out_ += "<p class=\"verdict\">" + text + ".</p>\n";
    if (HasBaseline()) {
      if (const std::string warning = OrderWarning(*record_.baseline); !warning.empty()) {
        out_ += Paragraph("Beware: " + warning + ".");
      }
    }
    if (!record_.final_evaluation) {
      out_ += Paragraph(
          "This is the last value computed during training, which may cover a sample of the "
          "held-out part.");
    }
  }

  void Tile(const std::string& value, const std::string& label) {
    out_ += fmt::format("<li><b>{}</b><span>{}</span></li>\n", EscapeXml(value), EscapeXml(label));
  }
  void Tiles() {
    out_ += "<ul class=\"tiles\">\n";
    const double last = LastHeldout(record_);
    if (std::isfinite(last)) {
      Tile(fmt::format("{:.4f}", last),
           bits_ ? "held-out bits per " + unit_ : "held-out loss (nats)");
      Tile(fmt::format("{:.3f}", bits_ ? std::exp2(last) : std::exp(last)), "held-out perplexity");
    }
    if (const double loss = Last(&StepRecord::loss); std::isfinite(loss)) {
      Tile(fmt::format("{:.4f}", loss), "last training loss (nats)");
    }
    Tile(internal::TickText(record_.steps.back().step, 1), "steps");
    if (const double tokens = TokensSeen(); std::isfinite(tokens))
      Tile(Count(tokens), "tokens trained");
    double milliseconds = 0;
    for (const StepRecord& step : record_.steps) {
      if (std::isfinite(step.step_ms)) milliseconds += step.step_ms;
    }
    if (milliseconds > 0) Tile(Duration(milliseconds / 1000), "in training steps");
    if (const double speed = MedianSpeed(); std::isfinite(speed)) {
      Tile(internal::TickText(std::round(speed), 1), "tokens a second (median)");
    }
    if (const double peak = Last(&StepRecord::memory_peak_bytes); std::isfinite(peak)) {
      Tile(fmt::format("{} MiB", internal::TickText(std::round(peak * 0x1p-20), 1)), "peak memory");
    }
    if (idle_.all > 0) Tile(fmt::format("{} of {}", idle_.idle, idle_.all), "idle experts");
    out_ += "</ul>\n";
  }
  static IdleExperts IdleOf(const RunRecord& record) {
    std::vector<ExpertLoad> loads;
    for (const StepRecord& step : record.steps) {
      if (!step.expert_load.empty()) loads.push_back(step.expert_load);
    }
    return CountIdleExperts(loads);
  }
  double TokensSeen() const { return Last(&StepRecord::tokens_seen); }
  double MedianSpeed() const {
    std::vector<double> speeds;
    for (const StepRecord& step : record_.steps) {
      if (std::isfinite(step.tokens_per_s)) speeds.push_back(step.tokens_per_s);
    }
    if (speeds.empty()) return kMissing;
    const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
    std::nth_element(speeds.begin(), middle, speeds.end());
    return *middle;
  }

  void Section(const std::string& title, const std::string& text) {
    out_ += fmt::format("<h2>{}</h2>\n", title) + Paragraph(text);
  }
  // A card with one drawing for each width of the page.
  void Card(const std::string& heading, const std::optional<LineChart>& chart, bool hero = false) {
    if (!chart) return;
    out_ += fmt::format("<section class=\"card{}\"><h3>{}</h3>\n", hero ? " hero has-wide" : "",
                        EscapeXml(heading));
    if (hero) out_ += "<div class=\"wide\">" + Render(*chart, kWide) + "</div>\n";
    out_ += "<div class=\"middle\">" + Render(*chart, kMiddle) + "</div>\n";
    out_ += "<div class=\"narrow\">" + Render(*chart, kNarrow) + "</div>\n</section>\n";
  }

  void Learning() {
    Section("Learning", LearningText());
    const auto curve = LearningCurve(record_);
    if (!curve) {
      out_ += Paragraph("No loss has been logged.");
      return;
    }
    Card(bits_ ? "Bits per " + unit_ : "Loss", curve, true);
    if (IsNucleotide(record_) && bits_ && record_.holds_out() && !record_.baseline) {
      out_ += Paragraph(
          "There is no baseline.json here, so no Markov line: cistron baseline writes it for the "
          "same split.");
    }
    if (!IsNucleotide(record_) && bits_ && record_.holds_out()) {
      out_ += Paragraph("No Markov line: " + WhyNoMarkovBaseline(record_.alphabet()) + ".");
    }
    HeldoutTable();
    BaselineTable();
  }

  bool HasBaseline() const {
    return IsNucleotide(record_) && record_.baseline && !record_.baseline->scores.empty();
  }
  std::string LearningText() const {
    std::string text = "Lower is better.";
    if (!record_.holds_out())
      text += " This run holds nothing out: the curve is the training loss.";
    if (bits_ && IsNucleotide(record_)) {
      text += " Two bits a base is what a model pays that knows nothing.";
    }
    if (HasBaseline()) {
      text +=
          " The other dotted lines are the best Markov model of each kind, counted on the same "
          "training part and scored on the same held-out part: on all of its bases, each with its "
          "whole context, while the model sees windows, whose first base is not scored.";
    }
    if (HasSampledHeldout(record_)) {
      text +=
          " Points on the way were scored on a sample of the held-out part; the diamond at the end "
          "is the whole of it, so a step from the last point to it may be the sample's.";
    }
    return text;
  }

  void HeldoutTable() {
    std::string rows;
    for (const StepRecord& step : record_.steps) {
      if (!std::isfinite(step.heldout_loss) && !std::isfinite(step.heldout_bits_per_base)) continue;
      rows += HeldoutRow(internal::TickText(step.step, 1), step.heldout_loss,
                         step.heldout_bits_per_base, step.heldout_bases);
    }
    if (record_.final_evaluation) {
      const FinalEvaluation& f = *record_.final_evaluation;
      rows += HeldoutRow("final", f.heldout_loss, f.heldout_bits_per_base, f.heldout_bases);
    }
    if (rows.empty()) return;
    out_ += fmt::format(
        "<details><summary>Held-out values</summary><div class=\"scroll\"><table><tr><th>step</th>"
        "<th class=\"n\">loss, nats</th><th class=\"n\">bits per {0}</th><th class=\"n\">{0}s "
        "scored</th></tr>\n{1}</table></div></details>\n",
        unit_, rows);
  }
  static std::string HeldoutRow(const std::string& step, double loss, double bits, double bases) {
    const auto cell = [](double v) { return std::isfinite(v) ? fmt::format("{:.4f}", v) : "–"; };
    return fmt::format(
        "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td "
        "class=\"n\">{}</td></tr>\n",
        step, cell(loss), cell(bits),
        std::isfinite(bases) ? internal::TickText(bases, 1) : std::string("–"));
  }

  void BaselineTable() {
    if (!HasBaseline()) return;
    out_ += fmt::format(
        "<details><summary>All Markov models</summary><div "
        "class=\"scroll\"><pre>{}</pre></div></details>\n",
        EscapeXml(FormatTable(*record_.baseline)));
  }

  void Optimisation() {
    Section(
        "Training step",
        "Means of neighbouring steps; the band is their range. The auxiliary loss of all layers "
        "together adds the layers up before it compares the experts: it may be at its least "
        "while single layers leave most of their experts idle, which the maps of the load "
        "show.");
    out_ += "<div class=\"grid\">\n";
    Card("Loss from the first step", LossChart(record_));
    Card("Auxiliary loss of all layers together", AuxiliaryLossChart(record_));
    Card("Load-balancing loss of each layer", LayerAuxiliaryLossChart(record_));
    Card("Router z-loss of each layer", ZLossChart(record_));
    Card("Learning rate", RateChart(record_));
    Card("Gradient norm", GradientNormChart(record_));
    Card("Tokens a second", SpeedChart(record_));
    Card("Peak memory", MemoryChart(record_));
    out_ += "</div>\n";
  }

  void Experts() {
    const auto wide = LoadMaps(record_, kMapBinsMiddle), narrow = LoadMaps(record_, kMapBinsNarrow);
    if (wide.empty()) {
      Section("Experts", "This run logged no expert load.");
    } else {
      Section("Load of the experts",
              fmt::format(
                  "The share of a layer's tokens that each expert receives, relative to an even "
                  "share. No token is dropped, but an expert that gets next to none of them hardly "
                  "learns and adds nothing: at the end of this run {}.",
                  Describe(idle_)));
      out_ += "<div class=\"legend\">" + RenderHeatLegend(wide[0].range) +
              "</div>\n<div class=\"grid\">\n";
      Maps(wide, narrow);
      Card("Evenness by layer", BalanceChart(record_));
      out_ += "</div>\n";
    }
    const auto bases = BaseMaps(record_);
    const std::string title = fmt::format("Which {} each expert serves", unit_);
    if (bases.empty()) {
      // Bytes are too many to be told apart in a picture.
      const bool never = record_.alphabet() == data::Alphabet::kBytes || !record_.holds_out();
      if (!never) {
        Section(title,
                "There is no expert_bases.json here: it is written when a run ends, from the "
                "held-out part.");
      }
      return;
    }
    Section(title, fmt::format("Of the tokens that an expert received over the held-out part, the "
                               "share at which each {0} stands (the {0} that the model reads "
                               "there, not the one it predicts). The colour compares it with the "
                               "{0}'s share of all tokens.",
                               unit_));
    out_ += "<div class=\"legend\">" + RenderHeatLegend(bases[0].range) +
            "</div>\n<div class=\"grid\">\n";
    Maps(bases, bases);
    out_ += "</div>\n";
  }
  void Maps(const std::vector<HeatMap>& middle, const std::vector<HeatMap>& narrow) {
    for (std::size_t l = 0; l < middle.size(); ++l) {
      out_ += "<section class=\"card\"><div class=\"middle\">" + Render(middle[l], kMapMiddle) +
              "</div>\n<div class=\"narrow\">" + Render(narrow[l], kMapNarrow) +
              "</div></section>\n";
    }
  }

  void Profile() {
    if (record_.profile.empty()) return;
    Section("Where the time of a step goes",
            "Roof: the part of what the machine was measured to do at most, in products or in "
            "copies of memory, whichever is nearer.");
    out_ += "<div class=\"scroll\"><pre>" + EscapeXml(record_.profile) + "</pre></div>\n";
  }

  void Summary() {
    Section("Run", "What made this run, so that it can be made again.");
    if (!record_.machine.empty()) {
      out_ += "<div class=\"scroll\"><table>\n";
      for (const auto& [key, value] : record_.machine) {
        out_ += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", EscapeXml(key), EscapeXml(value));
      }
      out_ += "</table></div>\n";
    }
    if (record_.config.empty()) {
      out_ += Paragraph("There is no config.yaml here.");
    } else {
      out_ += "<details><summary>Effective configuration</summary><pre>" +
              EscapeXml(record_.config) + "</pre></details>\n";
    }
  }

  const RunRecord& record_;
  const bool bits_;
  const std::string unit_;  // of the sequences: base, residue, byte
  const IdleExperts idle_ = IdleOf(record_);
  std::string out_;
};

}  // namespace

std::string RenderReport(const RunRecord& record) {
  CISTRON_CHECK(!record.steps.empty(), "report: the run has no step");
  return Page(record).Build();
}

std::string RenderLearningCurve(const RunRecord& record) {
  const auto curve = LearningCurve(record);
  CISTRON_CHECK(curve.has_value(), "report: the run has neither a training nor a held-out loss");
  return StandaloneSvg(Render(*curve, {900, 400}));
}

std::filesystem::path WriteReport(const std::filesystem::path& run_directory,
                                  const std::filesystem::path& output) {
  const std::filesystem::path path = output.empty() ? run_directory / "report.html" : output;
  io::WriteFileAtomically(path, RenderReport(ReadRunRecord(run_directory)));
  return path;
}

}  // namespace cistron::train
