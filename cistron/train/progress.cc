#include "cistron/train/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace cistron::train {
namespace {

constexpr std::size_t kBarWidth = 24;

std::size_t TerminalWidth(std::FILE* out) {
  winsize size{};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

std::string FormatDuration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string FormatCount(double count) {
  if (count >= 1e9) return fmt::format("{:.1f}G", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f}M", count / 1e6);
  if (count >= 1e3) return fmt::format("{:.1f}k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

Progress::Progress(std::FILE* out, std::int64_t done, std::int64_t total, std::int64_t log_every,
                   std::string unit, bool lines_only)
    : out_(out),
      terminal_(!lines_only && isatty(fileno(out)) != 0),
      done_(done),
      total_(total),
      log_every_(log_every),
      unit_(std::move(unit)) {}

Progress::~Progress() {
  if (bar_drawn_) std::fputc('\n', out_);
  std::fflush(out_);
}

std::string Progress::Status(const StepMetrics& m) const {
  std::string text = fmt::format("loss {:.4f}  {:.4f} bits/{}  {} tok/s", m.loss,
                                 m.loss / std::numbers::ln2, unit_, FormatCount(m.tokens_per_s));
  if (m.mfu) {
    text += fmt::format("  MFU {:.0f}%", *m.mfu * 100);
  } else if (m.flops_per_s > 0) {
    text += fmt::format("  {:.3g} GFLOP/s", m.flops_per_s / 1e9);
  }
  return text + fmt::format("  left {}", FormatDuration(seconds_per_step_ *
                                                        static_cast<double>(total_ - m.step)));
}

void Progress::Step(const StepMetrics& m) {
  const double seconds = m.step_ms / 1e3;
  // A mean over about the last twenty steps.
  seconds_per_step_ = seconds_per_step_ == 0 ? seconds : 0.95 * seconds_per_step_ + 0.05 * seconds;
  if (m.heldout) {
    Line(fmt::format("step {:>6}/{}  held-out loss {:.4f}  {:.4f} bits/{}  ({} {}s)", m.step,
                     total_, m.heldout->loss, m.heldout->bits_per_base, unit_,
                     FormatCount(static_cast<double>(m.heldout->bases)), unit_));
  }
  if (!terminal_) {
    if (m.step % log_every_ == 0 || m.step == total_ || m.step == done_ + 1) {
      Line(fmt::format("step {:>6}/{}  {}  lr {:.2e}  grad {:.3f}", m.step, total_, Status(m), m.lr,
                       m.grad_norm));
    }
    return;
  }
  const std::size_t filled = static_cast<std::size_t>(
      static_cast<double>(kBarWidth) * static_cast<double>(m.step) / static_cast<double>(total_));
  std::string line = fmt::format("[{}{}] {}/{}  {}", std::string(filled, '='),
                                 std::string(kBarWidth - filled, ' '), m.step, total_, Status(m));
  line.resize(std::min(line.size(), TerminalWidth(out_) - 1));
  std::fprintf(out_, "\r%s\033[K", line.c_str());
  std::fflush(out_);
  bar_drawn_ = true;
}

void Progress::ClearBar() {
  if (bar_drawn_) std::fputs("\r\033[K", out_);
  bar_drawn_ = false;
}

void Progress::Line(const std::string& text) {
  ClearBar();
  std::fprintf(out_, "%s\n", text.c_str());
  std::fflush(out_);
}

}  // namespace cistron::train
