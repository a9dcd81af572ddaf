#include "cistron/train/profile.h"

#include <fmt/format.h>

#include <algorithm>

namespace cistron::train {

Profile::Row& Profile::Find(std::string_view op, std::string_view implementation) {
  for (Row& row : rows_) {
    if (row.op == op && row.implementation == implementation) return row;
  }
  return rows_.emplace_back(Row{std::string(op), std::string(implementation)});
}

void Profile::Begin(std::string_view op, std::string_view implementation) {
  last_op_ = op;
  last_implementation_ = implementation;
  if (!started_) return;
  EndOp();
  Row& row = Find(op, implementation);
  ++row.calls;
  current_ = static_cast<std::size_t>(&row - rows_.data());
  if (device_.type == DeviceType::kCuda) {
    events_.emplace_back(current_, cuda::Event(device_));
    events_.back().second.Record();
  } else {
    begin_ = Clock::now();
  }
  running_ = true;
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

std::string Profile::Table() const {
  double total = 0;
  for (const Row& row : rows_) total += row.ms;
  std::string text = fmt::format("{:<18} {:<14} {:>7} {:>10} {:>7}\n", "op", "implementation",
                                 "calls", "ms", "share");
  for (const Row& row : Rows()) {
    text += fmt::format("{:<18} {:<14} {:>7} {:>10.3f} {:>6.1f}%\n", row.op, row.implementation,
                        row.calls, row.ms, total > 0 ? 100 * row.ms / total : 0);
  }
  return text;
}

}  // namespace cistron::train
