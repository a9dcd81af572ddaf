#include "cistron/train/cluster.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <initializer_list>
#include <set>
#include <sstream>
#include <string_view>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

constexpr double kGiga = 1e9, kTera = 1e12, kMicro = 1e-6;
constexpr std::int64_t kGpusPerNode = 8;

// Data sheets of NVIDIA: dense bf16 product, HBM, NVLink in one direction. Memory as the driver
// shows it.
struct DataSheet {
  std::string_view name;
  std::int64_t mib;
  double tflops, hbm_gb_per_s, link_gb_per_s;
};
constexpr std::array kDataSheets = {
    DataSheet{"A100", 81920, 312, 2039, 300}, DataSheet{"H100", 81559, 989, 3350, 450},
    DataSheet{"H200", 143771, 989, 4800, 450}, DataSheet{"B200", 183359, 2250, 8000, 900}};

// Of an H200, docs/benchmarks.md: the step of two layers of Mixtral-8x7B and single ops.
constexpr GpuRates kH200 = {.product_flops = 633 * kTera,
                            .grouped_flops = 674 * kTera,
                            .attention_flops = 622 * kTera,
                            .attention_backward_flops = 458 * kTera,
                            .copy_bytes_per_s = 4280 * kGiga,
                            .optimizer_of_copy = 0.91,
                            .passes_of_copy = 0.88};
// Of two H200 joined by 18 lanes of NVLink 4: bus bandwidth of NCCL at 64 and 256 MiB, through
// which the line of Link goes.
constexpr Link Through(double gb_per_s_at_64, double gb_per_s_at_256, double sent_of_size) {
  const double small = sent_of_size * 0x1p26, large = sent_of_size * 0x1p28;
  const double t_small = small / (gb_per_s_at_64 * kGiga),
               t_large = large / (gb_per_s_at_256 * kGiga);
  const double rate = (large - small) / (t_large - t_small);
  return {rate, t_small - small / rate};
}
// A rank of two sends half of what it has, and in an all-reduce all of it.
constexpr Collectives kNvLink4 = {.all_to_all = Through(188, 263, 0.5),
                                  .all_gather = Through(176, 229, 0.5),
                                  .reduce_scatter = Through(166, 216, 0.5),
                                  .all_reduce = Through(238, 285, 1.0),
                                  .slows_products = 0.32};
// Assumed: a 400 Gbit/s adapter a GPU, four fifths of it used.
constexpr Link kAdapter = {.bytes_per_s = 40 * kGiga, .latency_s = 20 * kMicro};

Cluster OfDataSheet(const DataSheet& sheet, std::int64_t gpus) {
  const DataSheet& measured = kDataSheets[2];
  Cluster c;
  c.name = fmt::format("{}x{}", gpus, sheet.name);
  c.gpus_per_node = std::min(gpus, kGpusPerNode);
  c.nodes = gpus / c.gpus_per_node;
  c.memory_bytes = sheet.mib << 20;
  c.rates = kH200;
  const double flops = sheet.tflops / measured.tflops;
  for (double* rate : {&c.rates.product_flops, &c.rates.grouped_flops, &c.rates.attention_flops,
                       &c.rates.attention_backward_flops}) {
    *rate *= flops;
  }
  c.rates.copy_bytes_per_s *= sheet.hbm_gb_per_s / measured.hbm_gb_per_s;
  c.within = kNvLink4;
  const double link = sheet.link_gb_per_s / measured.link_gb_per_s;
  for (Link* l : {&c.within.all_to_all, &c.within.all_gather, &c.within.reduce_scatter,
                  &c.within.all_reduce}) {
    l->bytes_per_s *= link;
  }
  c.between = kAdapter;
  c.sources = sheet.name == measured.name
                  ? "GPU measured on one H200, NVLink on two (docs/plan.md)"
                  : fmt::format(
                        "not measured: an H200's parts of its data sheet, applied to that "
                        "of {} (docs/plan.md)",
                        sheet.name);
  if (c.nodes > 1) c.sources += "; adapters between nodes assumed";
  return c;
}

class Reader {
 public:
  Reader(const YAML::Node& node, std::string where) : node_(node), where_(std::move(where)) {
    if (!node_.IsMap()) CISTRON_THROW(kBadInput, "{}: this is no map of keys", where_);
  }
  void OnlyKeys(std::initializer_list<std::string_view> keys) const {
    for (const auto& entry : node_) {
      const auto key = entry.first.as<std::string>();
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
      CISTRON_THROW(kBadInput, "{}: there is no key '{}'; known: {}", where_, key,
                    fmt::join(keys, ", "));
    }
  }
  bool Has(const char* key) const { return node_[key].IsDefined(); }
  std::string Text(const char* key) const { return Has(key) ? node_[key].as<std::string>() : ""; }
  double Positive(const char* key) const {
    double value = 0;
    if (!Has(key)) CISTRON_THROW(kBadInput, "{}: the key '{}' is missing", where_, key);
    if (!node_[key].IsScalar() || !YAML::convert<double>::decode(node_[key], value) ||
        !(value > 0) || !std::isfinite(value)) {
      CISTRON_THROW(kBadInput, "{}: {} must be a number greater than 0", where_, key);
    }
    return value;
  }
  double Positive(const char* key, double otherwise) const {
    return Has(key) ? Positive(key) : otherwise;
  }
  std::int64_t Count(const char* key) const {
    const double value = Positive(key);
    if (value != std::floor(value) || value > 1e6) {
      CISTRON_THROW(kBadInput, "{}: {} must be a whole number up to 1000000", where_, key);
    }
    return static_cast<std::int64_t>(value);
  }
  Reader Map(const char* key) const { return {node_[key], fmt::format("{}: {}", where_, key)}; }

 private:
  YAML::Node node_;
  std::string where_;
};

Link ReadLink(const Reader& r) {
  return {r.Positive("gb_per_s") * kGiga, r.Positive("latency_us") * kMicro};
}

Collectives ReadCollectives(const Reader& r) {
  r.OnlyKeys({"gb_per_s", "latency_us", "all_to_all", "all_gather", "reduce_scatter", "all_reduce",
              "slows_products"});
  Collectives c;
  c.slows_products = r.Positive("slows_products", kNvLink4.slows_products);
  for (const auto& [key, link] :
       {std::pair{"all_to_all", &c.all_to_all}, std::pair{"all_gather", &c.all_gather},
        std::pair{"reduce_scatter", &c.reduce_scatter}, std::pair{"all_reduce", &c.all_reduce}}) {
    const Reader of = r.Has(key) ? r.Map(key) : r;
    if (r.Has(key)) of.OnlyKeys({"gb_per_s", "latency_us"});
    *link = ReadLink(of);
  }
  return c;
}

}  // namespace

Cluster ParseCluster(const std::string& yaml, const std::string& name) {
  try {
    const Reader r(YAML::Load(yaml), name);
    r.OnlyKeys({"name", "nodes", "gpus_per_node", "memory_gib", "product_tflops", "grouped_tflops",
                "attention_tflops", "attention_backward_tflops", "copy_gb_per_s",
                "optimizer_of_copy", "passes_of_copy", "within", "between", "sources"});
    Cluster c;
    c.name = r.Has("name") ? r.Text("name") : name;
    c.nodes = r.Count("nodes");
    c.gpus_per_node = r.Count("gpus_per_node");
    c.memory_bytes = static_cast<std::int64_t>(r.Positive("memory_gib") * 0x1p30);
    GpuRates& g = c.rates;
    g.product_flops = r.Positive("product_tflops") * kTera;
    g.grouped_flops = r.Positive("grouped_tflops", g.product_flops / kTera) * kTera;
    g.attention_flops = r.Positive("attention_tflops", g.product_flops / kTera) * kTera;
    g.attention_backward_flops =
        r.Positive("attention_backward_tflops", g.attention_flops / kTera) * kTera;
    g.copy_bytes_per_s = r.Positive("copy_gb_per_s") * kGiga;
    g.optimizer_of_copy = r.Positive("optimizer_of_copy", kH200.optimizer_of_copy);
    g.passes_of_copy = r.Positive("passes_of_copy", kH200.passes_of_copy);
    if (c.gpus_per_node > 1) {
      if (!r.Has("within")) {
        CISTRON_THROW(kBadInput, "{}: the key 'within' is missing: what joins {} GPUs of a node",
                      name, c.gpus_per_node);
      }
      c.within = ReadCollectives(r.Map("within"));
    }
    if (c.nodes > 1) {
      if (!r.Has("between")) {
        CISTRON_THROW(kBadInput, "{}: the key 'between' is missing: what joins {} nodes", name,
                      c.nodes);
      }
      const Reader between = r.Map("between");
      between.OnlyKeys({"gb_per_s", "latency_us"});
      c.between = ReadLink(between);
    }
    c.sources = r.Has("sources") ? r.Text("sources") : name;
    return c;
  } catch (const YAML::Exception& error) {
    CISTRON_THROW(kBadInput, "{}: {}", name, error.what());
  }
}

Cluster FindCluster(const std::string& text) {
  const std::size_t x = text.find('x');
  std::int64_t gpus = 0;
  const char* const begin = text.data();
  if (x != std::string::npos && x > 0) {
    const auto [end, error] = std::from_chars(begin, begin + x, gpus);
    if (error != std::errc() || end != begin + x) gpus = 0;
  }
  for (const DataSheet& sheet : kDataSheets) {
    if (gpus < 1 || text.substr(x + 1) != sheet.name) continue;
    if (gpus > kGpusPerNode && gpus % kGpusPerNode != 0) {
      CISTRON_THROW(kBadInput,
                    "cluster={}: more than {} GPUs come in nodes of {}; the nearest is {}x{}; for "
                    "other nodes give a file (docs/plan.md)",
                    text, kGpusPerNode, kGpusPerNode,
                    (gpus + kGpusPerNode / 2) / kGpusPerNode * kGpusPerNode, sheet.name);
    }
    return OfDataSheet(sheet, gpus);
  }
  std::ifstream in(text);
  if (!in || std::filesystem::is_directory(text)) {
    CISTRON_THROW(kBadInput,
                  "cluster={}: the cluster is NxDEVICE with one of A100, H100, H200, B200, or the "
                  "path of a YAML file (docs/plan.md); there is no such file. For the memory of "
                  "one other GPU give plan.memory_gib=N",
                  text);
  }
  std::stringstream content;
  content << in.rdbuf();
  return ParseCluster(content.str(), text);
}

}  // namespace cistron::train
