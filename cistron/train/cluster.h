// The machines that a run is planned for: memory and rates of a GPU, and of what joins the GPUs.
// The rates are measured ones where somebody measured; each cluster says where its rates are from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace cistron::train {

// A message of b bytes takes latency_s + b / bytes_per_s: the model of Hockney, "The communication
// challenge for MPP", Parallel Computing 20 (1994).
struct Link {
  double bytes_per_s = 0;
  double latency_s = 0;

  double Seconds(double bytes) const { return latency_s + bytes / bytes_per_s; }
};

// What a GPU sends by each collective. `bytes_per_s` is of what the rank sends (the "bus bandwidth"
// of nccl-tests), which is comparable between numbers of ranks.
struct Collectives {
  Link all_to_all, all_gather, reduce_scatter, all_reduce;
  // Seconds that products lose for each second in which a collective runs beside them, whether it
  // stays in the node or not; 0 to 1.
  double slows_products = 0;
};

struct GpuRates {
  double product_flops = 0;             // bf16, dense products, sustained
  double grouped_flops = 0;             // bf16, products of experts
  double attention_flops = 0;           // forward
  double attention_backward_flops = 0;  // backward
  double copy_bytes_per_s = 0;          // read and written
  double optimizer_of_copy = 1;         // of it, what the update reaches
  double passes_of_copy = 1;            // and norms, permutes, sums
};

struct Cluster {
  std::string name;  // "8xH200", or that of the file
  std::int64_t nodes = 1, gpus_per_node = 1;
  std::int64_t memory_bytes = 0;  // of a GPU
  GpuRates rates;
  Collectives within;   // a node
  Link between;         // nodes, of one GPU's share; bytes_per_s 0: one node
  std::string sources;  // where the rates are from

  std::int64_t Ranks() const { return nodes * gpus_per_node; }
};

// "8xH200": so many GPUs in nodes of eight (A100, H100, H200, B200), or the path of a YAML file
// (docs/plan.md). Throws kBadInput, kIo.
Cluster FindCluster(const std::string& text);
// The text of such a file, `name` standing for it in errors.
Cluster ParseCluster(const std::string& yaml, const std::string& name);

}  // namespace cistron::train
