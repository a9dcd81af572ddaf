// What a person sees while a run trains: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "cistron/train/metrics.h"

namespace cistron::train {

// "0:52", "12:07", "3:04:05".
std::string FormatDuration(double seconds);
// "14.2k", "3.1M".
std::string FormatCount(double count);

class Progress {
 public:
  // Writes to `out`. `done` steps were made before; `log_every` is for plain lines, which
  // `lines_only` asks for on a terminal, too; `unit` names a letter of the sequences ("base").
  Progress(std::FILE* out, std::int64_t done, std::int64_t total, std::int64_t log_every,
           std::string unit, bool lines_only = false);
  ~Progress();

  // After a step: redraws the bar, or prints a line when one is due.
  void Step(const StepMetrics& metrics);
  // A line of its own, above the bar.
  void Line(const std::string& text);

 private:
  std::string Status(const StepMetrics& metrics) const;
  void ClearBar();

  std::FILE* out_;
  bool terminal_;
  std::int64_t done_, total_, log_every_;
  std::string unit_;
  double seconds_per_step_ = 0;
  bool bar_drawn_ = false;
};

}  // namespace cistron::train
