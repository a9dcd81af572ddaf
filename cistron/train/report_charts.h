// The charts of a report, from the record of a run. Internal to report.cc.
#pragma once

#include <optional>
#include <vector>

#include "cistron/train/run_record.h"
#include "cistron/train/svg_chart.h"

namespace cistron::train {

// Whether the run's losses are told in bits per base: DNA, by its held-out values or its baseline.
bool InBits(const RunRecord& record);
// The last held-out value in the run's unit: the final evaluation, else the last one on the way;
// NaN when none.
double LastHeldout(const RunRecord& record);

// Charts without a finite point are absent.
std::optional<LineChart> LearningCurve(
    const RunRecord& record);  // held-out and training, zoomed in
std::optional<LineChart> LossChart(
    const RunRecord& record);  // from the first step, nats, log scale
std::optional<LineChart> AuxiliaryLossChart(const RunRecord& record);
std::optional<LineChart> RateChart(const RunRecord& record);
std::optional<LineChart> GradientNormChart(const RunRecord& record);
std::optional<LineChart> SpeedChart(const RunRecord& record);
std::optional<LineChart> MemoryChart(const RunRecord& record);
std::optional<LineChart> BalanceChart(const RunRecord& record);  // entropy of the load by layer

// One map a layer: experts × time, and experts × bases. Empty when not recorded.
std::vector<HeatMap> LoadMaps(const RunRecord& record, int time_bins);
std::vector<HeatMap> BaseMaps(const RunRecord& record);

}  // namespace cistron::train
