// The whole training step on ranks with a GPU each; JSON lines, from rank 0.
//
//   mpirun -np N rank_step_bench MODEL key=value …
//
// MODEL: a shape of `cistron bench`. Keys, with their defaults: rows=1 sequences of each rank, or
// several numbers of them, rows=1,2; dp=1; ep=N; shard=none or full; states=fp32 or bf16;
// gradients=auto, fp32 or bf16; steps=7 measured ones; warmup=2 before them; lr=1e-4; sync=device
// or host, as parallel.ep_sync; factor=1.5, as parallel.ep_buffer_factor; profile=1 prints where
// one more step's time goes, of rank 0; routing=random, that of random weights, or even: biases
// that only select move by the rule of loss-free balancing until experts have even shares, which
// takes warmup=60 or so. `busiest_rank` is how uneven routing is: a step takes as long as its
// busiest rank. `tokens_per_s` is one GPU's. Without mpirun it measures one GPU.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/bench_step.h"

namespace cistron {
namespace {

using Keys = std::map<std::string, std::string>;

Keys Parse(int argc, char** argv) {
  Keys keys = {{"rows", "1"},        {"dp", "1"},           {"ep", ""},        {"shard", "none"},
               {"states", "fp32"},   {"gradients", "auto"}, {"steps", "7"},    {"warmup", "2"},
               {"lr", "1e-4"},       {"sync", "device"},    {"factor", "1.5"}, {"profile", "0"},
               {"routing", "random"}};
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::size_t equals = argument.find('=');
    const auto found = keys.find(argument.substr(0, equals));
    CISTRON_CHECK(equals != std::string::npos && found != keys.end(),
                  "rank_step_bench: '{}' is not key=value with one of the keys {}", argument,
                  fmt::join(keys, ", "));
    found->second = argument.substr(equals + 1);
  }
  return keys;
}

int Run(const std::string& model, const Keys& keys, comm::Communicator& control) {
  const auto integer = [&](const char* key) { return std::stol(keys.at(key)); };
  const Device device = comm::nccl::DeviceOfRank(control);
  const auto ranks = comm::nccl::Connect(control, device);
  train::BenchShape shape = train::NamedBenchShape(model);
  if (keys.at("routing") == "even") {
    shape.model.scoring_func = model::ScoringFunc::kSigmoid;
    shape.model.moe_router_enable_expert_bias = true;
    shape.model.moe_router_bias_update_rate = 0.01;
  }
  std::vector<std::int64_t> batches;
  std::istringstream rows(keys.at("rows"));
  for (std::string number; std::getline(rows, number, ',');) batches.push_back(std::stol(number));
  const std::int64_t dp = integer("dp"), ep = keys.at("ep").empty() ? ranks->size() : integer("ep");
  const parallel::Mesh mesh(*ranks, dp, ep, shape.model.num_local_experts);
  const std::vector<train::BenchResult> results = train::BenchBatches(
      ops::Context(device), shape,
      {.precision = train::Precision::kBf16,
       .steps = integer("steps"),
       .warmup = integer("warmup"),
       .states = train::ParseStates(keys.at("states")),
       .gradients = train::ParseGradients(keys.at("gradients")),
       .profile = integer("profile") != 0,
       .lr = std::stod(keys.at("lr")),
       .expert_exchange = {.why_by_host = keys.at("sync") == "host" ? "sync=host" : "",
                           .buffer_factor = std::stod(keys.at("factor"))},
       .mesh = &mesh,
       .sharded = keys.at("shard") == "full"},
      batches);
  if (ranks->rank() != 0) return 0;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const train::BenchResult& r = results[i];
    fmt::print(stderr, "{}", r.profile);
    fmt::print(
        "{{\"model\": \"{}\", \"rows\": {}, \"dp\": {}, \"ep\": {}, \"shard\": \"{}\", "
        "\"states\": \"{}\", \"gradients\": \"{}\", \"sync\": \"{}\", \"factor\": {}, \"routing\": "
        "\"{}\", "
        "\"lr\": {}, \"tokens_per_s\": {:.0f}, \"ms\": {:.1f}, \"fastest_ms\": {:.1f}, "
        "\"device_peak_mib\": {}, \"allocations\": {}, \"redone\": {}, \"loss\": {:.4f}, "
        "\"step_ms\": [{:.1f}], \"busiest_rank\": [{:.3f}], \"steps\": \"{}\"}}\n",
        model, batches[i], dp, ep, keys.at("shard"), keys.at("states"), keys.at("gradients"),
        keys.at("sync"), keys.at("factor"), keys.at("routing"), keys.at("lr"), r.tokens_per_s, r.ms,
        r.fastest_ms, r.device_peak_mib, r.allocations, r.redone, r.loss,
        fmt::join(r.step_ms, ", "), fmt::join(r.busiest_rank, ", "), r.steps_run);
  }
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: rank_step_bench MODEL key=value …\n");
    return 2;
  }
  try {
    const cistron::Keys keys = cistron::Parse(argc, argv);
    return cistron::comm::mpi::RunRank(
        [&](cistron::comm::Communicator& control) { return cistron::Run(argv[1], keys, control); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
