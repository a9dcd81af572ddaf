// Speed and memory of the whole training step at given shapes: random tokens, forward, backward,
// clipping, AdamW.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cistron/model/mixtral_config.h"
#include "cistron/ops/context.h"
#include "cistron/parallel/expert_parallel_dispatcher.h"
#include "cistron/parallel/mesh.h"
#include "cistron/tensor/kernel_trace.h"
#include "cistron/train/memory_plan.h"
#include "cistron/train/precision.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

struct BenchShape {
  model::MixtralConfig model;
  std::int64_t sequence = 512;
  std::int64_t batch = 8;
};
// "small", "wide", "fine", "dna_…", "8x7b_…": vocabulary 256, auxiliary loss on. Throws
// kInvalidArgument for another name.
std::vector<std::string> BenchShapeNames();
BenchShape NamedBenchShape(const std::string& name);

struct BenchOptions {
  Precision precision = Precision::kFp32;
  std::int64_t steps = 7;       // measured
  std::int64_t warmup = 2;      // before them
  std::int64_t micro_rows = 0;  // rows computed at once; 0: all
  model::Recompute recompute = model::Recompute::kNone;
  OptimStates states = OptimStates::kF32;
  OptimGradients gradients = OptimGradients::kAuto;
  CudaGraph cuda_graph = CudaGraph::kAuto;
  // Is asked how busy a GPU is in the measured steps, whose times hold what noting costs. Null:
  // not.
  cuda::KernelTrace* trace = nullptr;
  bool profile = false;  // one step more, op by op
  double lr = 1e-3;
  parallel::ExpertExchange expert_exchange{};  // between ranks
  // Of several ranks that train the shape together, each on a batch of its own; parameters sharded.
  const parallel::Mesh* mesh = nullptr;
  bool sharded = false;
};
// "none", "moe" or "layer"; "fp32" or "bf16"; "auto", "fp32" or "bf16".
model::Recompute ParseRecompute(const std::string& name);
OptimStates ParseStates(const std::string& name);
OptimGradients ParseGradients(const std::string& name);
// Of the memory that a step of the shape needs (memory_plan.h). Throws kInvalidArgument where
// states or gradients in bf16 are not for the precision.
MemoryProblem MemoryProblemOf(const BenchShape& shape, const BenchOptions& options,
                              DeviceType device);

struct BenchResult {
  double tokens_per_s = 0;  // of the median step; one rank's
  double ms = 0;            // median step
  double fastest_ms = 0;
  double cpu_ms = 0;                 // processor time of the process in a measured step, on average
  std::int64_t device_peak_mib = 0;  // of tensors on a GPU, buffers for rows of experts included
  std::int64_t redone = 0;           // measured steps that were made again
  std::int64_t rss_mib = 0;          // peak resident memory less its peak before the model existed
  std::int64_t allocations = 0;      // from the driver, or the system, during measured steps
  std::string steps_run;             // StepRunner::note
  cuda::DeviceTime device_time;      // of all measured steps, where asked for
  std::string profile;               // table of one step, where asked for (profile.h)
  double loss = 0;                   // of the last step, auxiliary loss included
  std::vector<double> step_ms;       // of the measured steps, in their order
  // Rows that the busiest rank's experts had over those of an even share, in each layer, mean of
  // the layers: of each measured step. A step takes as long as its busiest rank. 1 for one rank.
  std::vector<double> busiest_rank;
};
BenchResult BenchTrainStep(const ops::Context& ctx, const BenchShape& shape,
                           const BenchOptions& options);
// One after another with one model, which takes long to make: BenchShape::batch is each of
// `batches` in turn.
std::vector<BenchResult> BenchBatches(const ops::Context& ctx, const BenchShape& shape,
                                      const BenchOptions& options,
                                      std::span<const std::int64_t> batches);

}  // namespace cistron::train
