#include "cistron/train/report_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

namespace cistron::train {
namespace {

constexpr std::size_t kMaxPoints = 400;
// Layers drawn as lines of their own; more are drawn as their mean and range.
constexpr std::size_t kMaxLayerLines = 6;
// Cells of all load maps of one width together.
constexpr std::size_t kMaxCells = 16'000;

bool AnyFinite(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

Series Over(const RunRecord& record, const char* name, double StepRecord::*member, int color,
            double factor = 1) {
  Series series;
  series.name = name;
  series.color = color;
  for (const StepRecord& step : record.steps) {
    if (!std::isfinite(step.*member)) continue;
    series.x.push_back(step.step);
    series.y.push_back(step.*member * factor);
  }
  return series;
}

// Mean over up to `reach` neighbours on either side, as many on both, so that the ends are not
// pulled.
Series Smooth(Series series, std::size_t reach) {
  std::vector<double> sums = {0};
  for (const double y : series.y) sums.push_back(sums.back() + y);
  const std::size_t n = series.y.size();
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t r = std::min({reach, i, n - 1 - i});
    series.y[i] = (sums[i + r + 1] - sums[i - r]) / static_cast<double>(2 * r + 1);
  }
  return series;
}

std::optional<LineChart> Single(const RunRecord& record, const char* title, const char* label,
                                double StepRecord::*member, double factor = 1) {
  LineChart chart;
  chart.title = title;
  chart.x_label = "step";
  chart.y_label = label;
  chart.series = {Thin(Over(record, title, member, 0, factor), kMaxPoints)};
  if (!AnyFinite(chart.series[0].y)) return std::nullopt;
  return chart;
}

// The best model of each kind, with the label of its line.
std::vector<ReferenceLine> MarkovLines(const MarkovBaseline& baseline) {
  std::vector<ReferenceLine> lines;
  for (const bool both : {false, true}) {
    for (const MarkovSmoothing smoothing :
         {MarkovSmoothing::kAdd, MarkovSmoothing::kInterpolated}) {
      MarkovBaseline kind;
      for (const MarkovScore& score : baseline.scores) {
        if (score.both_strands == both && score.smoothing == smoothing)
          kind.scores.push_back(score);
      }
      if (kind.scores.empty()) continue;
      const MarkovScore& best = kind.Best();
      const bool interpolated = smoothing == MarkovSmoothing::kInterpolated;
      const char* strands = both ? "both strands" : "forward strand";
      lines.push_back(
          {fmt::format("{}Markov, {}, order {}: {:.4f}", interpolated ? "interpolated " : "",
                       strands, best.order, best.bits_per_base),
           best.bits_per_base,
           fmt::format("{}, k = {}: {:.4f}", interpolated ? "interpolated" : strands, best.order,
                       best.bits_per_base)});
    }
  }
  return lines;
}

// What a model pays that knows nothing, and the Markov models; and an axis that shows how the run
// ends: its first steps start near log2 of the vocabulary, what matters happens far below.
void ZoomIn(const RunRecord& record, const Series& smooth, const Series& heldout,
            const Series& whole, LineChart& chart) {
  constexpr double kRoom = 1.03;
  double low = std::numeric_limits<double>::infinity(), high = 0;
  const double middle = (record.steps.front().step + record.steps.back().step) / 2;
  for (const Series* series : {&smooth, &heldout, &whole}) {
    for (std::size_t i = 0; i < series->x.size(); ++i) {
      low = std::min(low, series->y[i]);
      if (series->x[i] >= middle) high = std::max(high, series->y[i]);
    }
  }
  high *= kRoom;
  const int letters = data::AlphabetSize(record.alphabet());
  const double nothing = std::log2(letters);
  // Far above the run it would only flatten the picture.
  if (!(nothing > 1.5 * low)) {
    chart.references.push_back(
        {fmt::format("{} equal {}s: {:.3g}", letters == 4 ? "four" : fmt::format("{}", letters),
                     data::UnitName(record.alphabet()), nothing),
         nothing});
    high = std::max(high, kRoom * nothing);
  }
  if (record.baseline && IsNucleotide(record)) {
    const auto lines = MarkovLines(*record.baseline);
    chart.references.insert(chart.references.end(), lines.begin(), lines.end());
  }
  for (const ReferenceLine& line : chart.references) low = std::min(low, line.y);
  chart.y_max = high;
  chart.y_min = low - 0.1 * (high - low);
}

// A chart of a value a layer, one line each or their mean and range.
std::optional<LineChart> ByLayer(std::vector<Series> by_layer, const char* title,
                                 const char* label) {
  const std::size_t layers = by_layer.size();
  if (layers == 0 || by_layer[0].x.empty()) return std::nullopt;
  LineChart chart;
  chart.title = title;
  chart.x_label = "step";
  chart.y_label = label;
  for (Series& series : by_layer) series = Thin(series, kMaxPoints);
  if (layers <= kMaxLayerLines) {
    for (std::size_t l = 0; l < layers; ++l) {
      Series line = std::move(by_layer[l]);
      line.low.clear();
      line.high.clear();
      line.name = fmt::format("layer {}", l);
      line.color = static_cast<int>(l);
      chart.series.push_back(std::move(line));
    }
    return chart;
  }
  Series mean;
  mean.name = fmt::format("mean and range of {} layers", layers);
  for (std::size_t i = 0; i < by_layer[0].x.size(); ++i) {
    double sum = 0, low = by_layer[0].y[i], high = low;
    for (const Series& series : by_layer) {
      sum += series.y[i];
      low = std::min(low, series.y[i]);
      high = std::max(high, series.y[i]);
    }
    mean.x.push_back(by_layer[0].x[i]);
    mean.y.push_back(sum / static_cast<double>(layers));
    mean.low.push_back(low);
    mean.high.push_back(high);
  }
  chart.series.push_back(std::move(mean));
  return chart;
}

// Of a field with a value a layer; steps whose count of values is another are left out.
std::vector<Series> LayersOf(const RunRecord& record, std::vector<double> StepRecord::*field) {
  std::vector<Series> by_layer;
  for (const StepRecord& step : record.steps) {
    const std::vector<double>& values = step.*field;
    if (values.empty()) continue;
    if (by_layer.empty()) by_layer.resize(values.size());
    const bool finite =
        std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
    if (values.size() != by_layer.size() || !finite) continue;
    for (std::size_t l = 0; l < values.size(); ++l) {
      by_layer[l].x.push_back(step.step);
      by_layer[l].y.push_back(values[l]);
    }
  }
  return by_layer;
}

// Whether nearly all cells lie between half and twice an even share.
bool FitsFineScale(const std::vector<HeatMap>& maps) {
  std::size_t cells = 0, outside = 0;
  for (const HeatMap& map : maps) {
    for (const auto& row : map.ratios) {
      for (const double ratio : row) {
        ++cells;
        outside += ratio < 0.5 || ratio > 2;
      }
    }
  }
  return outside * 50 <= cells;
}

}  // namespace

bool HasSampledHeldout(const RunRecord& record) {
  if (!record.final_evaluation) return false;
  const double whole = record.final_evaluation->heldout_bases;
  return std::any_of(record.steps.begin(), record.steps.end(),
                     [whole](const StepRecord& step) { return step.heldout_bases < whole; });
}

bool IsNucleotide(const RunRecord& record) {
  return data::AlphabetSize(record.alphabet()) == 4;
}

bool InBits(const RunRecord& record) {
  if (record.baseline || record.data) return true;
  if (record.final_evaluation && std::isfinite(record.final_evaluation->heldout_bits_per_base)) {
    return true;
  }
  return std::any_of(record.steps.begin(), record.steps.end(), [](const StepRecord& step) {
    return std::isfinite(step.heldout_bits_per_base);
  });
}

double LastHeldout(const RunRecord& record) {
  const bool bits = InBits(record);
  if (record.final_evaluation) {
    const FinalEvaluation& final_evaluation = *record.final_evaluation;
    const double value =
        bits ? final_evaluation.heldout_bits_per_base : final_evaluation.heldout_loss;
    if (std::isfinite(value)) return value;
  }
  for (auto step = record.steps.rbegin(); step != record.steps.rend(); ++step) {
    const double value = bits ? step->heldout_bits_per_base : step->heldout_loss;
    if (std::isfinite(value)) return value;
  }
  return kMissing;
}

std::optional<LineChart> LearningCurve(const RunRecord& record) {
  const bool bits = InBits(record);
  const std::string unit(data::UnitName(record.alphabet()));
  LineChart chart;
  chart.title = fmt::format(
      "{} over the run: training loss{}{}", bits ? "Bits per " + unit : std::string("Loss"),
      record.holds_out() ? " and held-out part" : "",
      record.baseline && IsNucleotide(record) ? " against Markov models" : "");
  chart.x_label = "step";
  chart.y_label = bits ? "bits per " + unit : "loss, nats a token";
  const Series loss = Over(record, "training loss, smoothed", &StepRecord::loss, 0,
                           bits ? 1 / std::numbers::ln2 : 1.0);
  Series smooth = Smooth(loss, loss.y.size() / 60);
  const Series raw = Thin(loss, kMaxPoints / 2);
  Series heldout = Over(record, "held-out part",
                        bits ? &StepRecord::heldout_bits_per_base : &StepRecord::heldout_loss, 1);
  Series whole;  // scored at the end on all of it, so another measure than the points on the way
  const double last = LastHeldout(record);
  if (record.final_evaluation && std::isfinite(last)) {
    whole.name = "whole held-out part";
    whole.x = {record.steps.back().step};
    whole.y = {last};
    whole.color = 1;
    whole.diamonds = true;
    if (!heldout.x.empty() && heldout.x.back() == whole.x[0]) {
      heldout.x.pop_back();
      heldout.y.pop_back();
    }
    if (HasSampledHeldout(record)) heldout.name = "held-out part, a sample";
  }
  heldout.markers = heldout.x.size() <= 60;
  if (loss.y.empty() && heldout.y.empty() && whole.y.empty()) return std::nullopt;
  if (bits) ZoomIn(record, smooth, heldout, whole, chart);

  Series thinned = Thin(smooth, kMaxPoints);
  thinned.low.clear();
  thinned.high.clear();
  // The band is the range of single steps around the smoothed line.
  if (!raw.low.empty() && bits) {
    Series band = raw;
    band.name = "training loss, range of steps";
    for (double& y : band.y) y = kMissing;
    chart.series.push_back(std::move(band));
  }
  if (!thinned.y.empty()) chart.series.push_back(std::move(thinned));
  if (!heldout.y.empty()) chart.series.push_back(std::move(heldout));
  if (!whole.y.empty()) chart.series.push_back(std::move(whole));
  return chart;
}

std::optional<LineChart> LossChart(const RunRecord& record) {
  LineChart chart;
  chart.title = "Training and held-out loss from the first step";
  chart.x_label = "step";
  chart.y_label = "nats a token, log scale";
  chart.log_y = true;
  Series loss = Thin(Over(record, "training", &StepRecord::loss, 0), kMaxPoints);
  Series heldout = Over(record, "held-out", &StepRecord::heldout_loss, 1);
  heldout.markers = heldout.x.size() <= 60;
  if (loss.y.empty()) return std::nullopt;
  chart.series.push_back(std::move(loss));
  if (!heldout.y.empty()) chart.series.push_back(std::move(heldout));
  return chart;
}

std::optional<LineChart> AuxiliaryLossChart(const RunRecord& record) {
  return Single(record, "Auxiliary loss", "load-balancing loss", &StepRecord::aux_loss);
}

std::optional<LineChart> LayerAuxiliaryLossChart(const RunRecord& record) {
  return ByLayer(LayersOf(record, &StepRecord::layer_aux_loss), "Load-balancing loss of each layer",
                 "load-balancing loss");
}

std::optional<LineChart> ZLossChart(const RunRecord& record) {
  return ByLayer(LayersOf(record, &StepRecord::z_loss), "Router z-loss of each layer", "z-loss");
}

std::optional<LineChart> RateChart(const RunRecord& record) {
  return Single(record, "Learning rate", "learning rate", &StepRecord::lr);
}

std::optional<LineChart> GradientNormChart(const RunRecord& record) {
  auto chart =
      Single(record, "Gradient norm", "norm before clipping, log scale", &StepRecord::grad_norm);
  if (chart) chart->log_y = true;
  return chart;
}

std::optional<LineChart> SpeedChart(const RunRecord& record) {
  auto chart = Single(record, "All tokens", "tokens a second", &StepRecord::tokens_per_s);
  if (!chart) return chart;
  chart->title = "Tokens a second";
  Series unpadded =
      Thin(Over(record, "Without padding", &StepRecord::unpadded_tokens_per_s, 1), kMaxPoints);
  const Series& all = chart->series[0];
  if (unpadded.y.size() == all.y.size() && unpadded.y != all.y) chart->series.push_back(unpadded);
  chart->y_min = 0;
  return chart;
}

std::optional<LineChart> MemoryChart(const RunRecord& record) {
  auto chart = Single(record, "Peak memory", "MiB", &StepRecord::memory_peak_bytes, 0x1p-20);
  if (chart) chart->y_min = 0;
  return chart;
}

std::optional<LineChart> BalanceChart(const RunRecord& record) {
  const std::size_t layers = record.layers(), experts = record.experts();
  if (layers == 0 || experts < 2) return std::nullopt;
  std::vector<Series> by_layer(layers);
  for (const StepRecord& step : record.steps) {
    for (std::size_t l = 0; l < step.expert_load.size(); ++l) {
      const auto& load = step.expert_load[l];
      const double sum = std::accumulate(load.begin(), load.end(), 0.0);
      double entropy = 0;
      for (const double share : load) {
        if (share > 0) entropy -= share / sum * std::log(share / sum);
      }
      by_layer[l].x.push_back(step.step);
      by_layer[l].y.push_back(100 * entropy / std::log(static_cast<double>(experts)));
    }
  }
  auto chart = ByLayer(std::move(by_layer), "Evenness of the expert load by layer",
                       "% of the entropy of an even load");
  if (chart) chart->y_max = 100.5;
  return chart;
}

std::vector<HeatMap> LoadMaps(const RunRecord& record, int time_bins) {
  const std::size_t layers = record.layers(), experts = record.experts();
  std::vector<const StepRecord*> steps;
  for (const StepRecord& step : record.steps) {
    if (!step.expert_load.empty()) steps.push_back(&step);
  }
  if (steps.empty()) return {};
  // Pages of models with many experts stay within a few megabytes.
  const std::size_t affordable = std::max<std::size_t>(12, kMaxCells / (layers * experts));
  const std::size_t bins =
      std::min({steps.size(), static_cast<std::size_t>(time_bins), affordable});
  std::vector<HeatMap> maps;
  for (std::size_t l = 0; l < layers; ++l) {
    HeatMap map;
    map.title = fmt::format("Load of the experts of layer {} over the run", l);
    map.x_label = "step";
    map.y_label = fmt::format("layer {}: expert", l);
    map.x_min = steps.front()->step;
    map.x_max = steps.back()->step;
    for (std::size_t e = 0; e < experts; ++e) {
      map.row_labels.push_back(std::to_string(e));
      auto& row = map.ratios.emplace_back();
      auto& tooltips = map.tooltips.emplace_back();
      for (std::size_t bin = 0; bin < bins; ++bin) {
        const std::size_t begin = bin * steps.size() / bins, end = (bin + 1) * steps.size() / bins;
        double share = 0, all = 0;
        for (std::size_t i = begin; i < end; ++i) {
          const auto& load = steps[i]->expert_load[l];
          share += load[e];
          all += std::accumulate(load.begin(), load.end(), 0.0);
        }
        row.push_back(share / all * static_cast<double>(experts));
        tooltips.push_back(fmt::format(
            "steps {:.0f}–{:.0f}, expert {}: {:.1f}% of the tokens ({:.2f}× even)",
            steps[begin]->step, steps[end - 1]->step, e, 100 * share / all, row.back()));
      }
    }
    maps.push_back(std::move(map));
  }
  // One scale for all layers: the finer one unless it hides what happens.
  const double range = FitsFineScale(maps) ? 2 : 4;
  for (HeatMap& map : maps) map.range = range;
  return maps;
}

std::vector<HeatMap> BaseMaps(const RunRecord& record) {
  std::vector<HeatMap> maps;
  if (!record.expert_bases) return maps;
  const ExpertBases& data = *record.expert_bases;
  for (std::size_t l = 0; l < data.counts.size(); ++l) {
    const auto& layer = data.counts[l];
    if (layer.empty() || data.bases.empty()) continue;
    std::vector<double> of_base(data.bases.size(), 0.0);
    double all = 0;
    for (const auto& expert : layer) {
      for (std::size_t b = 0; b < expert.size(); ++b) of_base[b] += expert[b];
    }
    for (const double n : of_base) all += n;
    HeatMap map;
    map.title = fmt::format("{}s that the experts of layer {} serve",
                            record.alphabet() == data::Alphabet::kProtein ? "Residue" : "Base", l);
    map.y_label = fmt::format("layer {}: expert (its share of all tokens)", l);
    map.column_labels = data.bases;
    for (std::size_t e = 0; e < layer.size(); ++e) {
      const double mine = std::accumulate(layer[e].begin(), layer[e].end(), 0.0);
      map.row_labels.push_back(fmt::format("{} ({:.0f}%)", e, all > 0 ? 100 * mine / all : 0.0));
      auto& ratios = map.ratios.emplace_back();
      auto& texts = map.texts.emplace_back();
      auto& tooltips = map.tooltips.emplace_back();
      for (std::size_t b = 0; b < data.bases.size(); ++b) {
        const double share = mine > 0 ? layer[e][b] / mine : kMissing;
        const double usual = all > 0 ? of_base[b] / all : kMissing;
        ratios.push_back(share / usual);
        texts.push_back(std::isfinite(share) ? fmt::format("{:.0f}%", 100 * share) : "–");
        tooltips.push_back(fmt::format(
            "expert {}: {:.0f} tokens at {}, {:.1f}% of its own ({:.1f}% of all tokens are {})", e,
            layer[e][b], data.bases[b], 100 * share, 100 * usual, data.bases[b]));
      }
    }
    maps.push_back(std::move(map));
  }
  return maps;
}

}  // namespace cistron::train
