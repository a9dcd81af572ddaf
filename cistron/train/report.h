// A run directory becomes one self-contained HTML page: no script, nothing fetched.
//
// What it shows is what run_record.h reads; a section whose file is missing says so in a sentence.
// The page follows the reader's light or dark preference and fits screens from 400 px up.
#pragma once

#include <filesystem>
#include <string>

#include "cistron/train/run_record.h"

namespace cistron::train {

// The page. Throws kInvalidArgument when the record holds no step.
std::string RenderReport(const RunRecord& record);

// Bits per base against the Markov lines (bits per residue or byte, or nats, for runs without
// them), as an SVG file of its own.
std::string RenderLearningCurve(const RunRecord& record);

// Reads `run_directory` and writes the page atomically; returns its path (report.html there when
// `output` is empty). Throws what ReadRunRecord throws, and kIo.
std::filesystem::path WriteReport(const std::filesystem::path& run_directory,
                                  const std::filesystem::path& output = {});

}  // namespace cistron::train
