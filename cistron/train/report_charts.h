// The charts of a report, from the record of a run. Internal to report.cc.
#pragma once

#include <optional>
#include <vector>

#include "cistron/train/run_record.h"
#include "cistron/train/svg_chart.h"

namespace cistron::train {

// Whether the run's losses are told in bits a letter: where the alphabet is known, by the
// configuration, a held-out value or a baseline.
bool InBits(const RunRecord& record);
bool IsNucleotide(const RunRecord& record);
// Whether values on the way were scored on less than the whole held-out part of the end.
bool HasSampledHeldout(const RunRecord& record);
// The last held-out value in the run's unit: the final evaluation, else the last one on the way;
// NaN when none.
double LastHeldout(const RunRecord& record);

// Charts without a finite point are absent.
std::optional<LineChart> LearningCurve(
    const RunRecord& record);  // held-out and training, zoomed in
std::optional<LineChart> LossChart(
    const RunRecord& record);  // from the first step, nats, log scale
std::optional<LineChart> AuxiliaryLossChart(const RunRecord& record);
// A value a layer.
std::optional<LineChart> LayerAuxiliaryLossChart(const RunRecord& record);
std::optional<LineChart> ZLossChart(const RunRecord& record);
std::optional<LineChart> RateChart(const RunRecord& record);
std::optional<LineChart> GradientNormChart(const RunRecord& record);
std::optional<LineChart> SpeedChart(const RunRecord& record);
std::optional<LineChart> MemoryChart(const RunRecord& record);
std::optional<LineChart> BalanceChart(const RunRecord& record);  // entropy of the load by layer

// One map a layer: experts × time, and experts × bases. Empty when not recorded.
std::vector<HeatMap> LoadMaps(const RunRecord& record, int time_bins);
std::vector<HeatMap> BaseMaps(const RunRecord& record);

}  // namespace cistron::train
