#include "cistron/train/svg_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistron/base/error.h"

namespace cistron::train {
namespace internal {

std::vector<double> LinearTicks(double low, double high, int target) {
  if (!(high > low) || target < 1) return {low};
  const double raw = (high - low) / target;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw * (1 - 1e-9)) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> ticks;
  const double first = std::ceil(low / step - 1e-9), last = std::floor(high / step + 1e-9);
  for (double i = first; i <= last; ++i) ticks.push_back(i * step);
  return ticks;
}

std::vector<double> LogTicks(double low, double high, int target) {
  const double decades = std::log10(high / low);
  const std::vector<double> factors = decades * 3 <= target + 2   ? std::vector<double>{1, 2, 5}
                                      : decades * 2 <= target + 1 ? std::vector<double>{1, 3}
                                                                  : std::vector<double>{1};
  const double stride = std::max(1.0, std::ceil(decades / target));
  std::vector<double> ticks;
  for (double e = std::floor(std::log10(low)); e <= std::ceil(std::log10(high)); e += stride) {
    for (const double factor : factors) {
      const double tick = factor * std::pow(10.0, e);
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push_back(tick);
    }
  }
  // Less than a decade, between two such ticks: plain steps tell more.
  if (ticks.size() < 3 && decades < 1) return LinearTicks(low, high, target);
  return ticks;
}

std::vector<double> StepTicks(double low, double high, int target) {
  std::vector<double> ticks = LinearTicks(low, high, target);
  if (ticks.size() > 1 && ticks[1] - ticks[0] < 1) {
    ticks.clear();
    for (double step = std::ceil(low); step <= high; ++step) ticks.push_back(step);
  }
  std::erase_if(ticks, [](double tick) { return tick != std::floor(tick); });
  const double stride = ticks.size() > 1 ? ticks[1] - ticks[0] : (high - low) / target;
  const double last = std::floor(high);
  if (ticks.empty() || last - ticks.back() > 0.5 * stride) ticks.push_back(last);
  return ticks;
}

int DecimalsOf(double value) {
  constexpr int kMost = 6;
  for (int decimals = 0; decimals < kMost; ++decimals) {
    const double scaled = std::abs(value) * std::pow(10.0, decimals);
    if (std::abs(scaled - std::round(scaled)) <= 1e-6 * std::max(scaled, 1e-30) &&
        std::round(scaled) >= 1) {
      return decimals;
    }
  }
  return kMost;
}

std::string TickText(double value, double step) {
  if (value == 0) return "0";
  const double magnitude = std::abs(value);
  if (magnitude >= 1e7 || magnitude < 1e-3) return fmt::format("{:.3g}", value);
  const int decimals =
      step > 0 ? std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 6) : 3;
  std::string text = fmt::format("{:.{}f}", value, decimals);
  const std::size_t end = text.find('.') == std::string::npos ? text.size() : text.find('.');
  for (std::size_t i = end; i > (value < 0 ? 4u : 3u); i -= 3) text.insert(i - 3, ",");
  return text;
}

}  // namespace internal

namespace {

constexpr double kCharWidth = 6.6;  // of 12 px text, rounded up
constexpr int kColors = 6;
constexpr int kHoverBands = 72;
constexpr int kShortLabelWidth = 600;

double TextWidth(std::string_view text) {
  // Continuation bytes of UTF-8 draw nothing.
  const auto count = std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  });
  return kCharWidth * static_cast<double>(count);
}

std::string ColorClass(int color) {
  return fmt::format("c{}{}", color % kColors, (color / kColors) % 2 == 1 ? " dash" : "");
}

// A linear or logarithmic map from values to pixels.
class Scale {
 public:
  Scale(double low, double high, double from, double to, bool logarithmic)
      : low_(logarithmic ? std::log(low) : low),
        high_(logarithmic ? std::log(high) : high),
        from_(from),
        to_(to),
        log_(logarithmic) {}
  double operator()(double value) const {
    const double v = log_ ? std::log(value) : value;
    return from_ + (to_ - from_) * (v - low_) / (high_ - low_);
  }

 private:
  double low_, high_, from_, to_;
  bool log_;
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void Include(double v) {
    if (!std::isfinite(v)) return;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  // Never empty: an empty range becomes [0, 1], a single value gets room around it.
  void Widen(bool logarithmic) {
    if (!(low <= high)) {
      low = logarithmic ? 0.1 : 0;
      high = 1;
    }
    if (low == high) {
      const double room = low == 0 ? 1 : std::abs(low) * 0.1;
      low -= room;
      high += room;
    }
  }
};

class LineChartDrawing {
 public:
  LineChartDrawing(const LineChart& chart, ChartSize size)
      : chart_(chart), size_(size), x_range_(XRange()), y_range_(YRange()) {
    for (const Series& series : chart.series) {
      CISTRON_CHECK(series.x.size() == series.y.size() && series.low.size() == series.high.size() &&
                        (series.low.empty() || series.low.size() == series.x.size()),
                    "svg_chart: series \"{}\" has {} x, {} y, {} low and {} high values",
                    series.name, series.x.size(), series.y.size(), series.low.size(),
                    series.high.size());
    }
    top_ = LegendHeight() + (chart.y_label.empty() ? 8 : 24);
    bottom_ = size.height - (chart.x_label.empty() ? 24 : 40);
    const int target = std::max(3, (bottom_ - top_) / 44);
    y_ticks_ = chart.log_y ? internal::LogTicks(y_range_.low, y_range_.high, target)
                           : internal::LinearTicks(y_range_.low, y_range_.high, target);
    double widest = 0;
    for (const double tick : y_ticks_) widest = std::max(widest, TextWidth(YTickText(tick)));
    left_ = static_cast<int>(widest) + 12;
    right_ = size.width - 14;
  }

  std::string Draw() {
    out_ = fmt::format(
        "<svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" "
        "xmlns=\"http://www.w3.org/2000/svg\">\n",
        size_.width, size_.height, EscapeXml(chart_.title));
    const std::string clip = ClipId();
    out_ += fmt::format(
        "<clipPath id=\"{}\"><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/></clipPath>\n",
        clip, left_, top_, right_ - left_, bottom_ - top_);
    DrawLegend();
    DrawAxes();
    out_ += fmt::format("<g clip-path=\"url(#{})\">\n", clip);
    DrawBands();
    DrawReferences();
    DrawLines();
    out_ += "</g>\n";
    DrawDiamonds();
    DrawReferenceLabels();
    DrawHoverTargets();
    out_ += "</svg>\n";
    return std::move(out_);
  }

 private:
  bool Drawable(double x, double y) const {
    return std::isfinite(x) && std::isfinite(y) && (!chart_.log_y || y > 0);
  }
  Range XRange() const {
    Range range;
    for (const Series& series : chart_.series) {
      for (const double x : series.x) range.Include(x);
    }
    range.Widen(false);
    return range;
  }
  Range YRange() const {
    Range range;
    const auto include = [&](double y) {
      if (!chart_.log_y || y > 0) range.Include(y);
    };
    for (const Series& series : chart_.series) {
      for (const double y : series.y) include(y);
      for (const double y : series.low) include(y);
      for (const double y : series.high) include(y);
    }
    for (const ReferenceLine& line : chart_.references) include(line.y);
    range.Widen(chart_.log_y);
    if (chart_.log_y) {
      range.low /= 1.05;
      range.high *= 1.05;
    } else {
      const double room = 0.04 * (range.high - range.low);
      // Quantities that start at zero keep zero as the frame's edge.
      range.low = range.low >= 0 && range.low < room ? 0 : range.low - room;
      range.high += room;
    }
    if (chart_.y_min) range.low = *chart_.y_min;
    if (chart_.y_max) range.high = *chart_.y_max;
    range.Widen(chart_.log_y);
    return range;
  }
  Scale X() const { return {x_range_.low, x_range_.high, double(left_), double(right_), false}; }
  Scale Y() const {
    return {y_range_.low, y_range_.high, double(bottom_), double(top_), chart_.log_y};
  }
  std::string YTickText(double tick) const {
    const double step = y_ticks_.size() > 1 ? std::abs(y_ticks_[1] - y_ticks_[0]) : 0;
    return internal::TickText(tick,
                              chart_.log_y ? std::pow(10.0, -internal::DecimalsOf(tick)) : step);
  }
  // One a drawing: a page shows several, and ids are of the page.
  std::string ClipId() const {
    std::size_t hash = std::hash<std::string>()(chart_.title + chart_.y_label);
    return fmt::format("clip-{:x}-{}", hash & 0xffffffu, size_.width);
  }

  struct LegendEntry {
    double x, y;
    const Series* series;
  };
  std::vector<LegendEntry> Legend() const {
    std::vector<LegendEntry> entries;
    if (chart_.series.size() < 2 && chart_.references.empty()) return entries;
    double x = 4, y = 12;
    for (const Series& series : chart_.series) {
      const double width = TextWidth(series.name) + 40;
      if (x > 4 && x + width > size_.width) {
        x = 4;
        y += 18;
      }
      entries.push_back({x, y, &series});
      x += width;
    }
    return entries;
  }
  int LegendHeight() const {
    const auto entries = Legend();
    return entries.empty() ? 0 : static_cast<int>(entries.back().y) + 10;
  }
  void DrawLegend() {
    for (const LegendEntry& entry : Legend()) {
      const bool band_alone = std::none_of(entry.series->y.begin(), entry.series->y.end(),
                                           [](double y) { return std::isfinite(y); });
      if (entry.series->diamonds) {
        out_ += Diamond(*entry.series, entry.x + 9, entry.y);
      } else {
        out_ += band_alone
                    ? fmt::format(
                          "<rect class=\"band {}\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"18\" "
                          "height=\"10\"/>",
                          ColorClass(entry.series->color), entry.x, entry.y - 5)
                    : fmt::format(
                          "<line class=\"line {0}\" x1=\"{1:.0f}\" y1=\"{2:.0f}\" x2=\"{3:.0f}\" "
                          "y2=\"{2:.0f}\"/>",
                          ColorClass(entry.series->color), entry.x, entry.y, entry.x + 18);
      }
      if (entry.series->markers) {
        out_ += fmt::format("<circle class=\"dot {}\" cx=\"{:.0f}\" cy=\"{:.0f}\" r=\"3\"/>",
                            ColorClass(entry.series->color), entry.x + 9, entry.y);
      }
      out_ += fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\">{}</text>\n", entry.x + 24, entry.y + 4,
                          EscapeXml(entry.series->name));
    }
  }

  void DrawAxes() {
    const Scale sx = X(), sy = Y();
    for (const double tick : y_ticks_) {
      const double y = sy(tick);
      out_ += fmt::format(
          "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>"
          "<text class=\"tick\" x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
          left_, right_, y, left_ - 6, y + 4, YTickText(tick));
    }
    const std::vector<double> ticks =
        internal::StepTicks(x_range_.low, x_range_.high, std::max(2, (right_ - left_) / 90));
    for (const double tick : ticks) {
      const std::string text = internal::TickText(tick, 1);
      // The last label stays inside the drawing.
      const double at = std::min(sx(tick), size_.width - TextWidth(text) / 2);
      out_ += fmt::format(
          "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>"
          "<text class=\"tick\" x=\"{3:.1f}\" y=\"{4}\" text-anchor=\"middle\">{5}</text>\n",
          sx(tick), bottom_, bottom_ + 4, at, bottom_ + 17, text);
    }
    out_ += fmt::format("<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/>\n", left_,
                        right_, bottom_, bottom_);
    if (!chart_.y_label.empty()) {
      out_ += fmt::format("<text class=\"label\" x=\"4\" y=\"{}\">{}</text>\n", top_ - 10,
                          EscapeXml(chart_.y_label));
    }
    if (!chart_.x_label.empty()) {
      out_ += fmt::format("<text class=\"label\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n",
                          right_, size_.height - 6, EscapeXml(chart_.x_label));
    }
  }

  void DrawBands() {
    const Scale sx = X(), sy = Y();
    for (const Series& series : chart_.series) {
      if (series.low.empty()) continue;
      std::string upper, lower;
      for (std::size_t i = 0; i < series.x.size(); ++i) {
        if (!Drawable(series.x[i], series.low[i]) || !Drawable(series.x[i], series.high[i]))
          continue;
        upper += fmt::format("{:.1f},{:.1f} ", sx(series.x[i]), Bounded(sy(series.high[i])));
        lower.insert(0, fmt::format("{:.1f},{:.1f} ", sx(series.x[i]), Bounded(sy(series.low[i]))));
      }
      out_ += fmt::format("<polygon class=\"band {}\" points=\"{}{}\"/>\n",
                          ColorClass(series.color), upper, lower);
    }
  }
  // Over the frame, whose edge they may lie on.
  void DrawDiamonds() {
    const Scale sx = X(), sy = Y();
    for (const Series& series : chart_.series) {
      for (std::size_t i = 0; series.diamonds && i < series.x.size(); ++i) {
        const double x = series.x[i], y = series.y[i];
        if (!Drawable(x, y) || y < y_range_.low || y > y_range_.high) continue;
        out_ += Diamond(series, sx(x), sy(y)) + "\n";
      }
    }
  }
  static std::string Diamond(const Series& series, double x, double y) {
    constexpr double kReach = 6;
    return fmt::format("<path class=\"dot {}\" d=\"M{:.1f} {:.1f}l{r} {r}l-{r} {r}l-{r} -{r}z\"/>",
                       ColorClass(series.color), x, y - kReach, fmt::arg("r", kReach));
  }
  // Far outside the frame is as good as any: keeps the text short and the coordinates sane.
  double Bounded(double y) const { return std::clamp(y, -1000.0, size_.height + 1000.0); }

  void DrawLines() {
    const Scale sx = X(), sy = Y();
    for (const Series& series : chart_.series) {
      if (series.diamonds) continue;
      std::string path, dots;
      bool open = false;
      for (std::size_t i = 0; i < series.x.size(); ++i) {
        if (!Drawable(series.x[i], series.y[i])) {
          open = false;
          continue;
        }
        const double x = sx(series.x[i]), y = Bounded(sy(series.y[i]));
        path += fmt::format("{}{:.1f} {:.1f}", open ? "L" : "M", x, y);
        open = true;
        if (series.markers) {
          dots += fmt::format("<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>",
                              ColorClass(series.color), x, y);
        }
      }
      out_ += fmt::format("<path class=\"line {}\" d=\"{}\"/>{}\n", ColorClass(series.color), path,
                          dots);
    }
  }

  void DrawReferences() {
    const Scale sy = Y();
    for (const ReferenceLine& line : chart_.references) {
      if (line.y < y_range_.low || line.y > y_range_.high) continue;
      out_ += fmt::format(
          "<line class=\"reference\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>\n",
          left_, right_, sy(line.y));
    }
  }
  const std::string& LabelOf(const ReferenceLine& line) const {
    return size_.width < kShortLabelWidth && !line.short_label.empty() ? line.short_label
                                                                       : line.label;
  }
  // At the right end, above their lines, pushed apart where lines lie close.
  void DrawReferenceLabels() {
    const Scale sy = Y();
    std::vector<const ReferenceLine*> lines;
    for (const ReferenceLine& line : chart_.references) {
      if (line.y >= y_range_.low && line.y <= y_range_.high) lines.push_back(&line);
    }
    std::sort(lines.begin(), lines.end(), [](auto* a, auto* b) { return a->y < b->y; });
    double free_above = size_.height;
    for (const ReferenceLine* line : lines) {
      const double y = std::min(sy(line->y) - 4, free_above);
      out_ += fmt::format(
          "<text class=\"reference-label\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          right_ - 4, y, EscapeXml(LabelOf(*line)));
      free_above = y - 14;
    }
  }

  // Invisible columns whose <title> tells the values there.
  void DrawHoverTargets() {
    const Scale sx = X();
    std::vector<double> xs;
    for (const Series& series : chart_.series)
      xs.insert(xs.end(), series.x.begin(), series.x.end());
    std::erase_if(xs, [](double x) { return !std::isfinite(x); });
    std::sort(xs.begin(), xs.end());
    xs.erase(std::unique(xs.begin(), xs.end()), xs.end());
    if (xs.empty()) return;
    const std::size_t bands = std::min<std::size_t>(kHoverBands, xs.size());
    const double width = static_cast<double>(right_ - left_) / static_cast<double>(bands);
    for (std::size_t band = 0; band < bands; ++band) {
      const double x = xs[bands == 1 ? 0 : band * (xs.size() - 1) / (bands - 1)];
      const double at = std::clamp(sx(x) - width / 2, double(left_), right_ - width);
      out_ += fmt::format(
          "<rect class=\"hit\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" "
          "height=\"{}\"><title>{}</title>"
          "</rect>\n",
          at, top_, width, bottom_ - top_, EscapeXml(ValuesAt(x, width)));
    }
  }
  std::string ValuesAt(double x, double width) const {
    std::string text = fmt::format("{} {}", chart_.x_label, internal::TickText(x, 1));
    const double reach = (x_range_.high - x_range_.low) * width / (right_ - left_);
    for (const Series& series : chart_.series) {
      std::size_t nearest = series.x.size();
      for (std::size_t i = 0; i < series.x.size(); ++i) {
        if (!Drawable(series.x[i], series.y[i])) continue;
        if (nearest == series.x.size() ||
            std::abs(series.x[i] - x) < std::abs(series.x[nearest] - x)) {
          nearest = i;
        }
      }
      if (nearest == series.x.size() || std::abs(series.x[nearest] - x) > reach) continue;
      text += fmt::format("\n{}: {:.5g}", series.name, series.y[nearest]);
    }
    return text;
  }

  const LineChart& chart_;
  const ChartSize size_;
  const Range x_range_, y_range_;
  std::vector<double> y_ticks_;
  int left_ = 0, right_ = 0, top_ = 0, bottom_ = 0;
  std::string out_;
};

// Nine classes, equal steps of the ratio's logarithm.
int HeatClass(double ratio, double range) {
  if (!std::isfinite(ratio)) return 4;
  if (ratio <= 0) return 0;
  return static_cast<int>(
      std::clamp(std::lround(std::log(ratio) / std::log(range) * 4) + 4, 0l, 8l));
}

}  // namespace

std::string Render(const LineChart& chart, ChartSize size) {
  return LineChartDrawing(chart, size).Draw();
}

std::string Render(const HeatMap& map, ChartSize size) {
  const std::size_t rows = map.ratios.size();
  CISTRON_CHECK(rows > 0 && map.row_labels.size() == rows,
                "svg_chart: heat map \"{}\" has {} rows and {} row labels", map.title, rows,
                map.row_labels.size());
  const std::size_t columns = map.ratios[0].size();
  for (const auto& row : map.ratios) {
    CISTRON_CHECK(row.size() == columns && columns > 0,
                  "svg_chart: heat map \"{}\" has rows of {} and {} cells", map.title, columns,
                  row.size());
  }
  CISTRON_CHECK(map.range > 1, "svg_chart: heat map \"{}\" has range {}, not above 1", map.title,
                map.range);
  double widest = 0;
  for (const std::string& label : map.row_labels) widest = std::max(widest, TextWidth(label));
  const double left = widest + 10, right = size.width - 8;
  const double top = (map.y_label.empty() ? 4 : 20) + (map.column_labels.empty() ? 0 : 18);
  const double below = (map.x_min ? 20 : 4) + (map.x_label.empty() ? 0 : 16);
  const double row_height = std::clamp((size.height - top - below) / static_cast<double>(rows), 3.0,
                                       map.texts.empty() ? 18.0 : 24.0);
  const double bottom = top + row_height * static_cast<double>(rows);
  const double cell = (right - left) / static_cast<double>(columns);
  // Labels of thin rows would overlap: every n-th is drawn.
  const auto label_stride = static_cast<std::size_t>(std::ceil(13 / row_height));

  std::string out = fmt::format(
      "<svg class=\"chart heat\" viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\" "
      "xmlns=\"http://www.w3.org/2000/svg\">\n",
      size.width, bottom + below, EscapeXml(map.title));
  if (!map.y_label.empty()) {
    out +=
        fmt::format("<text class=\"label\" x=\"0\" y=\"12\">{}</text>\n", EscapeXml(map.y_label));
  }
  for (std::size_t c = 0; c < map.column_labels.size() && c < columns; ++c) {
    out += fmt::format(
        "<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
        left + (static_cast<double>(c) + 0.5) * cell, top - 5, EscapeXml(map.column_labels[c]));
  }
  for (std::size_t r = 0; r < rows; ++r) {
    const double y = top + row_height * static_cast<double>(r);
    if (r % label_stride == 0) {
      out += fmt::format(
          "<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          left - 5, y + std::min(row_height, 13.0) / 2 + 4 + std::max(0.0, (row_height - 13) / 2),
          EscapeXml(map.row_labels[r]));
    }
    for (std::size_t c = 0; c < columns; ++c) {
      const int level = HeatClass(map.ratios[r][c], map.range);
      const double x = left + cell * static_cast<double>(c);
      // A hair wider than the cell, so that no seam shows between neighbours of one colour.
      out += fmt::format(
          "<rect class=\"q{}\" x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"", level,
          x, y, cell + (map.texts.empty() ? 0.3 : -1.0), row_height - 1);
      out += map.tooltips.empty()
                 ? "/>"
                 : fmt::format("><title>{}</title></rect>", EscapeXml(map.tooltips[r][c]));
      if (!map.texts.empty()) {
        out += fmt::format(
            "<text class=\"cell t{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>",
            level, x + cell / 2, y + row_height / 2 + 4, EscapeXml(map.texts[r][c]));
      }
      out += "\n";
    }
  }
  if (map.x_min && map.x_max && *map.x_max > *map.x_min) {
    const Scale sx(*map.x_min, *map.x_max, left, right, false);
    const auto ticks = internal::StepTicks(*map.x_min, *map.x_max,
                                           std::max(2, static_cast<int>((right - left) / 90)));
    for (const double tick : ticks) {
      const std::string text = internal::TickText(tick, 1);
      out += fmt::format(
          "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>"
          "<text class=\"tick\" x=\"{3:.1f}\" y=\"{4:.1f}\" text-anchor=\"middle\">{5}</text>\n",
          sx(tick), bottom, bottom + 4, std::min(sx(tick), size.width - TextWidth(text) / 2),
          bottom + 16, text);
    }
  }
  if (!map.x_label.empty()) {
    out += fmt::format(
        "<text class=\"label\" x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", right,
        bottom + below - 3, EscapeXml(map.x_label));
  }
  return out + "</svg>\n";
}

Series Thin(const Series& series, std::size_t max_points) {
  const std::size_t n = series.x.size();
  if (n <= max_points || max_points == 0) return series;
  Series thin = series;
  thin.x.clear();
  thin.y.clear();
  thin.low.clear();
  thin.high.clear();
  for (std::size_t bin = 0; bin < max_points; ++bin) {
    const std::size_t begin = bin * n / max_points, end = (bin + 1) * n / max_points;
    Range range;
    double x = 0, y = 0;
    std::size_t finite = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (!std::isfinite(series.y[i])) continue;
      x += series.x[i];
      y += series.y[i];
      range.Include(series.y[i]);
      ++finite;
    }
    if (finite == 0) continue;
    thin.x.push_back(x / static_cast<double>(finite));
    thin.y.push_back(y / static_cast<double>(finite));
    thin.low.push_back(range.low);
    thin.high.push_back(range.high);
  }
  return thin;
}

}  // namespace cistron::train
