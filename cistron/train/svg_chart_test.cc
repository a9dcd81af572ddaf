#include "cistron/train/svg_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Tags of a fragment match and its text holds no bare special character; returns what is wrong, or
// nothing.
std::string XmlFault(const std::string& xml) {
  std::vector<std::string> open;
  for (std::size_t i = 0; i < xml.size(); ++i) {
    if (xml[i] == '>') return "stray > at " + std::to_string(i);
    if (xml[i] == '&') {
      const std::size_t end = xml.find(';', i);
      if (end == std::string::npos || end - i > 7) return "bare & at " + std::to_string(i);
    }
    if (xml[i] != '<') continue;
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return "a tag does not end";
    const std::string tag = xml.substr(i + 1, end - i - 1);
    if (tag.find('<') != std::string::npos) return "< inside a tag: " + tag;
    std::size_t quotes = 0;
    for (const char c : tag) quotes += c == '"';
    if (quotes % 2 != 0) return "odd quotes in " + tag;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "closes what is not open: " + tag;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find_first_of(" \n")));
    }
    i = end;
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

LineChart Example() {
  LineChart chart;
  chart.title = "loss <over> \"steps\" & more";
  chart.x_label = "step";
  chart.y_label = "bits";
  chart.series = {{"a <b>", {0, 1, 2, 3}, {2, NAN, 1.5, 1.2}, {}, {}, 0, true},
                  {"band", {0, 3}, {1, 2}, {0.5, 1}, {1.5, 2.5}, 7, false}};
  chart.references = {{"near & one", 1.94}, {"near two", 1.93}};
  return chart;
}

TEST(SvgChart, LineChartIsWellFormedAndEscaped) {
  for (const bool log_y : {false, true}) {
    LineChart chart = Example();
    chart.log_y = log_y;
    const std::string svg = Render(chart, {340, 260});
    EXPECT_EQ(XmlFault(svg), "");
    EXPECT_THAT(svg, HasSubstr("loss &lt;over&gt; &quot;steps&quot; &amp; more"));
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_THAT(svg, Not(HasSubstr("inf")));
    EXPECT_EQ(XmlFault(StandaloneSvg(svg)), "");
  }
  EXPECT_NE(XmlFault("<a><b></a>"), "");  // the check itself can fail
  EXPECT_NE(XmlFault("<a>x & y</a>"), "");
}

TEST(SvgChart, PointsLieWhereTheAxesSay) {
  LineChart chart;
  chart.series = {{"y", {0, 10}, {0, 100}, {}, {}, 0, false}};
  chart.y_min = 0;
  chart.y_max = 100;
  const std::string svg = Render(chart, {400, 200});
  // The frame's corners: left edge from the widest tick ("100"), right edge 14 px inside.
  const std::size_t path = svg.find("<path");
  ASSERT_NE(path, std::string::npos);
  double x0 = 0, y0 = 0, x1 = 0, y1 = 0;
  const std::size_t d = svg.find("d=\"M", path) + 3;
  ASSERT_EQ(std::sscanf(svg.c_str() + d, "M%lf %lfL%lf %lf", &x0, &y0, &x1, &y1), 4);
  EXPECT_EQ(x1, 386);
  EXPECT_EQ(y0, 176);
  EXPECT_EQ(y1, 8);
  EXPECT_GT(x0, 20);
  EXPECT_LT(x0, 50);
}

TEST(SvgChart, NoPointsOneStepAndConstantsDraw) {
  LineChart chart;
  chart.title = "t";
  EXPECT_EQ(XmlFault(Render(chart, {340, 200})), "");
  for (const double value : {0.0, 3.0, -2.0, 1e-30, 1e30, static_cast<double>(NAN)}) {
    for (const bool log_y : {false, true}) {
      chart.log_y = log_y;
      chart.series = {{"one", {7}, {value}, {}, {}, 0, true}};
      const std::string svg = Render(chart, {340, 200});
      EXPECT_EQ(XmlFault(svg), "");
      EXPECT_THAT(svg, Not(HasSubstr("nan"))) << value;
      EXPECT_THAT(svg, Not(HasSubstr("inf"))) << value;
    }
  }
}

TEST(SvgChart, ReferenceLabelsDoNotOverlap) {
  const std::string svg = Render(Example(), {340, 260});
  std::vector<double> y;
  for (std::size_t at = svg.find("reference-label"); at != std::string::npos;
       at = svg.find("reference-label", at + 1)) {
    y.push_back(std::stod(svg.substr(svg.find(" y=\"", at) + 4)));
  }
  ASSERT_EQ(y.size(), 2u);
  EXPECT_GE(y[0] - y[1], 13.9);
}

TEST(SvgChart, MismatchedSeriesThrow) {
  LineChart chart;
  chart.series = {{"bad", {1, 2}, {1}, {}, {}, 0, false}};
  EXPECT_THROW(Render(chart, {340, 200}), Error);
  chart.series = {{"bad", {1, 2}, {1, 2}, {1}, {1}, 0, false}};
  EXPECT_THROW(Render(chart, {340, 200}), Error);
}

TEST(SvgChart, HeatMapColoursByRatio) {
  HeatMap map;
  map.title = "map";
  map.row_labels = {"0", "1"};
  map.column_labels = {"A", "C", "G"};
  map.ratios = {{0, 1, 4}, {0.25, 2, NAN}};
  map.texts = {{"a", "b", "c"}, {"d", "e", "<"}};
  map.tooltips = map.texts;
  const std::string svg = Render(map, {340, 200});
  EXPECT_EQ(XmlFault(svg), "");
  std::string classes;
  for (std::size_t at = svg.find("class=\"q"); at != std::string::npos;
       at = svg.find("class=\"q", at + 1)) {
    classes += svg[at + 8];
  }
  EXPECT_EQ(classes, "048064");
  map.ratios[1].pop_back();
  EXPECT_THROW(Render(map, {340, 200}), Error);
  EXPECT_EQ(XmlFault(RenderHeatLegend(2)), "");
}

TEST(SvgChart, ManyExpertsKeepReadableLabels) {
  HeatMap map;
  for (int e = 0; e < 128; ++e) {
    map.row_labels.push_back(std::to_string(e));
    map.ratios.push_back(std::vector<double>(10, 1.0));
  }
  map.x_min = 1;
  map.x_max = 1000;
  const std::string svg = Render(map, {540, 420});
  EXPECT_THAT(svg, HasSubstr(">0</text>"));
  EXPECT_THAT(svg, Not(HasSubstr(">1</text>")));
}

TEST(SvgChart, ThinKeepsMeansAndRanges) {
  Series series{"s", {}, {}, {}, {}, 0, false};
  for (int i = 0; i < 10; ++i) {
    series.x.push_back(i);
    series.y.push_back(i % 2 == 0 ? 1.0 : 3.0);
  }
  EXPECT_EQ(Thin(series, 10).y, series.y);
  const Series thin = Thin(series, 5);
  EXPECT_THAT(thin.x, ElementsAre(0.5, 2.5, 4.5, 6.5, 8.5));
  EXPECT_THAT(thin.y, ElementsAre(2, 2, 2, 2, 2));
  EXPECT_THAT(thin.low, ElementsAre(1, 1, 1, 1, 1));
  EXPECT_THAT(thin.high, ElementsAre(3, 3, 3, 3, 3));
  series.y[0] = NAN;
  EXPECT_EQ(Thin(series, 5).y[0], 3);
}

TEST(SvgChart, Ticks) {
  using internal::LinearTicks;
  using internal::LogTicks;
  using internal::TickText;
  EXPECT_THAT(LinearTicks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(LinearTicks(-1, 1, 2), ElementsAre(-1, 0, 1));
  EXPECT_THAT(LinearTicks(3, 3, 5), ElementsAre(3));
  EXPECT_THAT(LogTicks(0.1, 10, 2), ElementsAre(0.1, 1, 10));
  EXPECT_THAT(LogTicks(0.18, 12, 5), ElementsAre(0.2, 0.5, 1, 2, 5, 10));
  EXPECT_GE(LogTicks(1.3, 1.6, 5).size(), 2u);
  EXPECT_LE(LogTicks(1e-30, 1e30, 5).size(), 7u);
  // Steps are whole, and the last is told.
  using internal::StepTicks;
  EXPECT_THAT(StepTicks(1, 3, 11), ElementsAre(1, 2, 3));
  EXPECT_THAT(StepTicks(6.3, 7.7, 3), ElementsAre(7));
  EXPECT_THAT(StepTicks(1, 18, 3), ElementsAre(10, 18));
  EXPECT_THAT(StepTicks(1, 1221, 11), ElementsAre(200, 400, 600, 800, 1000, 1200));
  EXPECT_EQ(internal::DecimalsOf(1.4), 1);
  EXPECT_EQ(internal::DecimalsOf(200), 0);
  EXPECT_EQ(internal::DecimalsOf(0.05), 2);
  EXPECT_EQ(TickText(1234567, 1), "1,234,567");
  EXPECT_EQ(TickText(-1234, 1), "-1,234");
  EXPECT_EQ(TickText(123, 1), "123");
  EXPECT_EQ(TickText(1.92, 0.02), "1.92");
  EXPECT_EQ(TickText(1e-5, 1e-5), "1e-05");
  EXPECT_EQ(TickText(0, 1), "0");
}

TEST(SvgChart, LogTicksKeepTheirDecimals) {
  LineChart chart;
  chart.log_y = true;
  chart.series = {{"y", {1, 2, 3}, {1.3, 1.45, 1.6}, {}, {}, 0, false}};
  const std::string svg = Render(chart, {340, 260});
  EXPECT_THAT(svg, HasSubstr(">1.4</text>"));
  EXPECT_THAT(svg, Not(HasSubstr(">1</text><")));
}

TEST(SvgChart, DiamondsHaveNoLine) {
  LineChart chart;
  chart.series = {{"line", {1, 5}, {1, 2}, {}, {}, 0, false},
                  {"end", {5}, {1.5}, {}, {}, 1, false, true}};
  const std::string svg = Render(chart, {340, 260});
  EXPECT_EQ(XmlFault(svg), "");
  // In the legend and in the frame.
  std::size_t diamonds = 0;
  for (std::size_t at = svg.find("class=\"dot c1\" d=\"M"); at != std::string::npos;
       at = svg.find("class=\"dot c1\" d=\"M", at + 1)) {
    ++diamonds;
  }
  EXPECT_EQ(diamonds, 2u);
  EXPECT_THAT(svg, Not(HasSubstr("class=\"line c1\"")));
}

TEST(SvgChart, EscapeXml) {
  EXPECT_EQ(EscapeXml("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(EscapeXml("é – 漢 😀"), "é – 漢 😀");
  const std::string replacement = "\xef\xbf\xbd";
  EXPECT_EQ(EscapeXml(std::string("\0x", 2)), replacement + "x");
  EXPECT_EQ(EscapeXml("\x1b"), replacement);
  EXPECT_EQ(EscapeXml("\xff"), replacement);
  EXPECT_EQ(EscapeXml("\xc0\xaf"), replacement + replacement);                    // overlong
  EXPECT_EQ(EscapeXml("\xed\xa0\x80"), replacement + replacement + replacement);  // surrogate
  EXPECT_EQ(EscapeXml("\xe6\xbc"), replacement + replacement);                    // cut short
}

}  // namespace
}  // namespace cistron::train
