#include "cistron/train/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cistron/tensor/trace.h"
#include "cistron/train/machine_peak.h"

namespace cistron::train {

Roofline MeasureRoofline(const ops::Context& ctx, DType dtype) {
  // What measures is no part of a profile.
  const ops::Context quiet = ctx.WithRecorder(nullptr);
  return {MeasurePeakFlops(quiet, dtype), MeasurePeakBandwidth(quiet)};
}

Profile::~Profile() {
  if (range_ != 0) EndTrace(range_);
}

Profile::Row& Profile::Find(std::string_view op, std::string_view implementation) {
  for (Row& row : rows_) {
    if (row.op == op && row.implementation == implementation) return row;
  }
  return rows_.emplace_back(Row{std::string(op), std::string(implementation)});
}

void Profile::Begin(std::string_view op, std::string_view implementation) {
  const ops::OpWork work = std::exchange(next_, {});
  if (TraceIsOn()) {
    if (range_ != 0) EndTrace(range_);
    range_ = StartTrace(op, implementation);
  }
  last_op_ = op;
  last_implementation_ = implementation;
  if (!started_) return;
  EndOp();
  Row& row = Find(op, implementation);
  ++row.calls;
  row.flops += work.flops;
  row.bytes += work.bytes;
  current_ = static_cast<std::size_t>(&row - rows_.data());
  if (device_.type == DeviceType::kCuda) {
    events_.emplace_back(current_, cuda::Event(device_));
    events_.back().second.Record();
  } else {
    begin_ = Clock::now();
  }
  running_ = true;
}

void Profile::Add(const ops::OpWork& work) {
  if (!started_ || rows_.empty()) return;
  rows_[current_].flops += work.flops;
  rows_[current_].bytes += work.bytes;
}

// Of a CPU; a GPU's are read at the end.
void Profile::EndOp() {
  if (!running_ || device_.type == DeviceType::kCuda) return;
  running_ = false;
  rows_[current_].ms += std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
}

void Profile::End() {
  EndOp();
  started_ = false;
  if (!running_) return;
  running_ = false;
  cuda::Event last(device_);
  last.Record();
  for (std::size_t i = 0; i < events_.size(); ++i) {
    const cuda::Event& next = i + 1 < events_.size() ? events_[i + 1].second : last;
    rows_[events_[i].first].ms += next.MillisecondsSince(events_[i].second);
  }
  events_.clear();
}

std::string Profile::last_op() const {
  if (last_implementation_.empty()) return std::string(last_op_);
  return fmt::format("{} ({})", last_op_, last_implementation_);
}

std::vector<Profile::Row> Profile::Rows() const {
  std::vector<Row> rows = rows_;
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.ms > b.ms; });
  return rows;
}

namespace {

// "612.1 TFLOP/s  78%": of the limit that the row is nearer to.
std::string RateText(const Profile::Row& row, const Roofline& peak) {
  const double seconds = row.ms / 1e3;
  const double of_flops = peak.flops > 0 ? row.flops / peak.flops / seconds : 0;
  const double of_bytes = peak.bytes_per_s > 0 ? row.bytes / peak.bytes_per_s / seconds : 0;
  const double part = std::max(of_flops, of_bytes);
  if (seconds <= 0 || part <= 0) return fmt::format("{:>17} {:>5}", "", "");
  const std::string rate = of_flops >= of_bytes
                               ? fmt::format("{:.2f} TFLOP/s", row.flops / seconds / 1e12)
                               : fmt::format("{:.1f} GB/s", row.bytes / seconds / 1e9);
  return fmt::format("{:>17} {:>4.0f}%", rate, 100 * part);
}

}  // namespace

std::string Profile::Table(const Roofline& peak, std::int64_t steps, double whole_ms) const {
  double sum = 0;
  for (const Row& row : rows_) sum += row.ms;
  const double whole = whole_ms > 0 ? whole_ms : sum;
  const auto n = static_cast<double>(std::max<std::int64_t>(1, steps));
  std::string text = fmt::format("{:<16} {:<15} {:>7} {:>10} {:>17} {:>5} {:>7}\n", "op",
                                 "implementation", "calls", "ms", "rate", "roof", "share");
  for (const Row& row : Rows()) {
    text += fmt::format("{:<16} {:<15} {:>7.0f} {:>10.3f} {} {:>6.1f}%\n", row.op,
                        row.implementation, static_cast<double>(row.calls) / n, row.ms / n,
                        RateText(row, peak), whole > 0 ? 100 * row.ms / whole : 0);
  }
  text += fmt::format("all ops {:.3f} ms of {:.3f} ms a step", sum / n, whole / n);
  if (peak.flops > 0) {
    text += fmt::format("; roof: products {:.2f} TFLOP/s, copies {:.0f} GB/s, measured here",
                        peak.flops / 1e12, peak.bytes_per_s / 1e9);
  }
  return text + "\n";
}

}  // namespace cistron::train
