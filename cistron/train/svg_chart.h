// Static SVG charts: lines over steps, and heat maps.
//
// A chart is text for inline use in a page that carries ChartCss(): colours are CSS variables
// there, so one drawing serves light and dark. StandaloneSvg() makes a file of its own of it. Text
// is drawn at a fixed size, so a page draws a chart once for every width that it lays out. Nothing
// here needs a script: values appear on hover through <title>. All text is escaped.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cistron::train {

struct ChartSize {
  int width = 520;
  int height = 300;
};

struct Series {
  std::string name;
  std::vector<double> x, y;       // of equal length; points that are not finite are left out
  std::vector<double> low, high;  // a band behind the line; empty: none
  int color = 0;                  // index into the palette (six colours, then again with dashes)
  bool markers = false;           // a dot at every point, for few points
  bool diamonds = false;          // diamonds instead of dots, and no line between them
};

struct ReferenceLine {
  std::string label;  // drawn at the right end, with the line
  double y = 0;
  std::string short_label = {};  // for narrow drawings; empty: the label
};

struct LineChart {
  std::string title;             // for those who cannot see it; a page writes its own heading
  std::string x_label, y_label;  // x counts steps: its ticks are whole numbers
  std::vector<Series> series;
  std::vector<ReferenceLine> references;
  bool log_y = false;                  // points ≤ 0 are left out
  std::optional<double> y_min, y_max;  // cuts lines at the frame; absent: what the data need
};

// Rows × columns of ratios to an even share, coloured from 1/range (blue) over 1 (neutral) to range
// (orange).
struct HeatMap {
  std::string title;
  std::string x_label, y_label;
  std::vector<std::string> row_labels;     // as many as rows
  std::vector<std::string> column_labels;  // as many as columns, drawn above; or empty
  std::optional<double> x_min, x_max;      // a number axis below instead; both or none
  std::vector<std::vector<double>> ratios;
  double range = 4;
  std::vector<std::vector<std::string>> texts;     // drawn in the cells; or empty
  std::vector<std::vector<std::string>> tooltips;  // or empty
};

std::string Render(const LineChart& chart, ChartSize size);
// The height follows from the rows: `size.height` is the most it may take.
std::string Render(const HeatMap& map, ChartSize size);
// The colour scale of heat maps of a range.
std::string RenderHeatLegend(double range);

// Averages neighbours so that at most `max_points` remain, keeping their range as the band.
Series Thin(const Series& series, std::size_t max_points);

// Colours and text of charts as CSS, light and dark.
std::string ChartCss();
// An SVG file that needs nothing else.
std::string StandaloneSvg(const std::string& svg);

// & < > " ' as entities; control characters other than newline and tab, and broken UTF-8, as
// U+FFFD.
std::string EscapeXml(std::string_view text);

namespace internal {
// Round numbers in [low, high], about `target` of them: multiples of 1, 2 or 5 times a power of
// ten.
std::vector<double> LinearTicks(double low, double high, int target);
// 1, and 3 or 2 and 5 where there is room, times powers of ten; linear ones in less than a decade.
std::vector<double> LogTicks(double low, double high, int target);
// Whole numbers in [low, high] as LinearTicks, and `high` itself where the last of them is far from
// it.
std::vector<double> StepTicks(double low, double high, int target);
// Decimals of the shortest text that is a round number itself: 1.4 has one.
int DecimalsOf(double value);
// Shortest text that tells ticks `step` apart: "1.92", "2,000", "1e-05".
std::string TickText(double value, double step);
}  // namespace internal

}  // namespace cistron::train
