// What all charts share: colours, the scale of heat maps, escaping.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cistron/base/error.h"
#include "cistron/train/svg_chart.h"

namespace cistron::train {

std::string RenderHeatLegend(double range) {
  std::string out = fmt::format(
      "<svg class=\"chart heat-legend\" viewBox=\"0 0 334 34\" role=\"img\" aria-label=\"Colour "
      "scale: share "
      "relative to an even one, from 1/{0:g} to {0:g} times\" "
      "xmlns=\"http://www.w3.org/2000/svg\">\n",
      range);
  for (int i = 0; i < 9; ++i) {
    const int x = 14 + i * 34;
    out += fmt::format("<rect class=\"q{}\" x=\"{}\" y=\"2\" width=\"34\" height=\"12\"/>", i, x);
    if (i % 2 != 0) continue;
    const double ratio = std::pow(range, (i - 4) / 4.0);
    const std::string label = i == 4 ? "even"
                                     : fmt::format("{}{:.2g}×",
                                                   i == 0   ? "≤ "
                                                   : i == 8 ? "≥ "
                                                            : "",
                                                   ratio);
    out += fmt::format("<text class=\"tick\" x=\"{}\" y=\"28\" text-anchor=\"middle\">{}</text>\n",
                       x + 17, label);
  }
  return out + "</svg>\n";
}

std::string ChartCss() {
  // Line colours keep 3:1 against their background, texts in cells 4.5:1.
  return R"css(
:root{--fg:#1c2128;--muted:#57606a;--grid:#e3e6ea;--card:#fff;--halo:#fff;
--c0:#0b62a8;--c1:#c2410c;--c2:#0f766e;--c3:#a21caf;--c4:#7a5c00;--c5:#4b5563;
--q0:#1f5a9c;--q1:#5b8fc7;--q2:#9dbfe0;--q3:#d3e2f1;--q4:#efeeea;--q5:#fbdcc0;--q6:#f3b07a;--q7:#dd7b35;--q8:#a84a0a;
--t0:#fff;--t1:#111;--t2:#111;--t3:#111;--t4:#111;--t5:#111;--t6:#111;--t7:#111;--t8:#fff}
@media(prefers-color-scheme:dark){:root{--fg:#e6edf3;--muted:#9aa5b1;--grid:#2c333c;--card:#171b21;--halo:#171b21;
--c0:#6cb6ff;--c1:#ff9f5a;--c2:#4fd1b5;--c3:#e59bf0;--c4:#d6c14a;--c5:#b4bcc6;
--q0:#9cc8f5;--q1:#4a8ac9;--q2:#2f6096;--q3:#27425f;--q4:#2a2f36;--q5:#54402f;--q6:#8a5528;--q7:#cf7d35;--q8:#ffc28a;
--t0:#111;--t1:#111;--t2:#fff;--t3:#fff;--t4:#e6edf3;--t5:#fff;--t6:#fff;--t7:#111;--t8:#111}}
.chart{display:block;width:100%;height:auto;font:12px system-ui,"DejaVu Sans",sans-serif}
.chart text{fill:var(--fg)}.chart .tick{fill:var(--muted);font-size:11.5px}.chart .label{fill:var(--muted)}
.chart .grid{stroke:var(--grid)}.chart .axis{stroke:var(--muted)}
.chart .line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.chart .dash{stroke-dasharray:5 3}
.chart .band{fill:var(--c);opacity:.2;stroke:none}.chart .dot{fill:var(--c);stroke:var(--card)}
.chart .reference{stroke:var(--muted);stroke-dasharray:2 3;stroke-width:1.3}
.chart .reference-label{font-size:11.5px;paint-order:stroke;stroke:var(--halo);stroke-width:4px;stroke-linejoin:round}
.chart .hit{fill:var(--fg);opacity:0}.chart .hit:hover{opacity:.08}
.heat rect{shape-rendering:crispEdges}
.chart .cell{font-size:11.5px;pointer-events:none}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.q0{fill:var(--q0)}.q1{fill:var(--q1)}.q2{fill:var(--q2)}.q3{fill:var(--q3)}.q4{fill:var(--q4)}.q5{fill:var(--q5)}
.q6{fill:var(--q6)}.q7{fill:var(--q7)}.q8{fill:var(--q8)}
.chart .t0{fill:var(--t0)}.chart .t1{fill:var(--t1)}.chart .t2{fill:var(--t2)}.chart .t3{fill:var(--t3)}
.chart .t4{fill:var(--t4)}.chart .t5{fill:var(--t5)}.chart .t6{fill:var(--t6)}.chart .t7{fill:var(--t7)}
.chart .t8{fill:var(--t8)}
)css";
}

std::string StandaloneSvg(const std::string& svg) {
  const std::size_t end = svg.find('>');
  CISTRON_CHECK(svg.rfind("<svg", 0) == 0 && end != std::string::npos,
                "svg_chart: not a drawing made by Render");
  return svg.substr(0, end + 1) + "\n<style>" + EscapeXml(ChartCss()) +
         "</style>\n<rect width=\"100%\" height=\"100%\" style=\"fill:var(--card)\"/>" +
         svg.substr(end + 1);
}

namespace {

// Bytes of the UTF-8 character at the start of `text`, 0 when there is none.
std::size_t CharacterLength(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto follows = [&](std::size_t n) {
    if (text.size() <= n) return false;
    for (std::size_t i = 1; i <= n; ++i) {
      if ((byte(i) & 0xc0) != 0x80) return false;
    }
    return true;
  };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf && follows(1)) return 2;
  if ((first & 0xf0) == 0xe0 && follows(2)) {
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) > 0x9f;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xf0 && first <= 0xf4 && follows(3)) {
    const bool outside = (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f);
    return outside ? 0 : 4;
  }
  return 0;
}

}  // namespace

std::string EscapeXml(std::string_view text) {
  constexpr const char* kReplacement = "\xef\xbf\xbd";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = CharacterLength(text);
    const char c = text[0];
    if (length == 0 || (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') ||
        c == 0x7f) {
      out += kReplacement;
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(1, length));
  }
  return out;
}

}  // namespace cistron::train
