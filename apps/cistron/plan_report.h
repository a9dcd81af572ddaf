// What `cistron plan` prints.
#pragma once

#include <string>

#include "cistron/train/cluster.h"
#include "cistron/train/step_plan.h"

namespace cistron::app {

// Of a step: a line a kind, the peak, and what is said of gradients in bf16.
void PrintMemory(const train::MemoryProblem& problem, const train::MemoryPlan& plan);

// Every layout of a cluster, best first, as one line of JSON: what ReportCluster's last table says,
// without its rounding.
std::string LayoutsJson(const train::StepProblem& problem, const train::Cluster& cluster);

// Of a cluster: one layout in full, then all of them, best first. The layout is that of `problem`
// where it has as many ranks as the cluster, else the best one. Returns the exit status: whether
// that layout fits. `simulate`: with what a simulation of its ranks sends, takes and holds.
int ReportCluster(const train::StepProblem& problem, const train::Cluster& cluster, bool simulate);

}  // namespace cistron::app
