#include "cistron/train/cluster.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/io/file.h"

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

// Of rates and latencies; in units of 1e12 it is far from what a double holds.
constexpr double kMostRate = 1e9;
constexpr double kMostGib = 1e6, kMostCount = 1e6;

// The map of a file, or one inside it.
class Reader {
 public:
  // `file`: its name; `path`: the keys of maps that this one is in, each with ": " after it.
  Reader(const YAML::Node& node, std::string file, std::string path,
         std::initializer_list<std::string_view> keys)
      : node_(node), file_(std::move(file)), path_(std::move(path)) {
    if (!node_.IsMap()) Fail(node_, "this is no map of keys");
    std::set<std::string> seen;
    for (const auto& entry : node_) {
      if (!entry.first.IsScalar()) Fail(entry.first, "a key must be a plain name");
      const std::string& key = entry.first.Scalar();
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        Fail(entry.first,
             fmt::format("there is no key '{}'; known: {}", key, fmt::join(keys, ", ")));
      }
      if (!seen.insert(key).second) {
        Fail(entry.first, fmt::format("{} is given twice in this file", key));
      }
    }
  }
  bool Has(const char* key) const { return node_[key].IsDefined(); }
  std::string Text(const char* key, const std::string& otherwise) const {
    if (!Has(key)) return otherwise;
    if (!node_[key].IsScalar()) FailValue(key, "text");
    return node_[key].Scalar();
  }
  double Positive(const char* key, double most = kMostRate) const {
    const double value = Number(key);
    if (!(value > 0)) FailValue(key, "a number greater than 0");
    if (!(value <= most)) FailValue(key, fmt::format("a number up to {}", most));
    return value;
  }
  double PositiveOr(double otherwise, const char* key, double most = kMostRate) const {
    return Has(key) ? Positive(key, most) : otherwise;
  }
  // From 0 to 1.
  double PartOr(double otherwise, const char* key) const {
    if (!Has(key)) return otherwise;
    const double value = Number(key);
    if (!(value >= 0 && value <= 1)) FailValue(key, "a number from 0 to 1");
    return value;
  }
  std::int64_t Count(const char* key) const {
    const double value = Number(key);
    if (!(value >= 1 && value <= kMostCount) || value != std::floor(value)) {
      FailValue(key, fmt::format("a whole number from 1 to {}", kMostCount));
    }
    return static_cast<std::int64_t>(value);
  }
  Reader Map(const char* key, std::initializer_list<std::string_view> keys) const {
    return {node_[key], file_, fmt::format("{}{}: ", path_, key), keys};
  }
  [[noreturn]] void FailMissing(const char* key, const std::string& meaning = {}) const {
    Fail(node_, fmt::format("the key '{}' is missing{}", key, meaning));
  }

 private:
  // Not a number where the value is none.
  double Number(const char* key) const {
    if (!Has(key)) FailMissing(key);
    double value = 0;
    const bool is_number =
        node_[key].IsScalar() && YAML::convert<double>::decode(node_[key], value);
    return is_number ? value : std::nan("");
  }
  [[noreturn]] void Fail(const YAML::Node& at, const std::string& what) const {
    const YAML::Mark mark = at.Mark();
    const std::string line = mark.is_null() ? "" : fmt::format(":{}", mark.line + 1);
    CISTRON_THROW(kBadInput, "{}{}: {}{}", file_, line, path_, what);
  }
  [[noreturn]] void FailValue(const char* key, const std::string& wanted) const {
    const YAML::Node value = node_[key];
    const std::string is = value.IsScalar()     ? value.Scalar()
                           : value.IsSequence() ? "a list"
                           : value.IsMap()      ? "a map"
                                                : "empty";
    // The key is where a person looks; an empty value is said to be on the next line.
    YAML::Node at = value;
    for (const auto& entry : node_) {
      if (entry.first.Scalar() == key) at = entry.first;
    }
    Fail(at, fmt::format("{} is {}; it must be {}", key, is, wanted));
  }

  YAML::Node node_;
  std::string file_, path_;
};

Link ReadLink(const Reader& r) {
  return {r.Positive("gb_per_s") * kGiga, r.Positive("latency_us") * kMicro};
}

Collectives ReadCollectives(const Reader& r) {
  Collectives c;
  c.slows_products = r.PartOr(kNvLink4.slows_products, "slows_products");
  for (const auto& [key, link] :
       {std::pair{"all_to_all", &c.all_to_all}, std::pair{"all_gather", &c.all_gather},
        std::pair{"reduce_scatter", &c.reduce_scatter}, std::pair{"all_reduce", &c.all_reduce}}) {
    *link = ReadLink(r.Has(key) ? r.Map(key, {"gb_per_s", "latency_us"}) : r);
  }
  return c;
}

YAML::Node ParseYaml(const std::string& yaml, const std::string& name) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(yaml);
    if (documents.size() > 1) {
      const YAML::Mark second = documents[1].Mark();
      CISTRON_THROW(kBadInput,
                    "{}{}: a second document begins here; a cluster is one: remove the `---` "
                    "before it",
                    name, second.is_null() ? "" : fmt::format(":{}", second.line + 1));
    }
    return documents.empty() ? YAML::Node() : documents[0];
  } catch (const YAML::Exception& error) {
    CISTRON_THROW(kBadInput, "{}:{}: this is not YAML: {}", name,
                  error.mark.is_null() ? 1 : error.mark.line + 1, error.msg);
  }
}

}  // namespace

Cluster ParseCluster(const std::string& yaml, const std::string& name) {
  const Reader r(
      ParseYaml(yaml, name), name, "",
      {"name", "nodes", "gpus_per_node", "memory_gib", "product_tflops", "grouped_tflops",
       "attention_tflops", "attention_backward_tflops", "copy_gb_per_s", "optimizer_of_copy",
       "passes_of_copy", "within", "between", "sources"});
  Cluster c;
  c.name = r.Text("name", name);
  c.nodes = r.Count("nodes");
  c.gpus_per_node = r.Count("gpus_per_node");
  c.memory_bytes = static_cast<std::int64_t>(r.Positive("memory_gib", kMostGib) * 0x1p30);
  GpuRates& g = c.rates;
  const double product = r.Positive("product_tflops"),
               attention = r.PositiveOr(product, "attention_tflops");
  g.product_flops = product * kTera;
  g.grouped_flops = r.PositiveOr(product, "grouped_tflops") * kTera;
  g.attention_flops = attention * kTera;
  g.attention_backward_flops = r.PositiveOr(attention, "attention_backward_tflops") * kTera;
  g.copy_bytes_per_s = r.Positive("copy_gb_per_s") * kGiga;
  g.optimizer_of_copy = r.PositiveOr(kH200.optimizer_of_copy, "optimizer_of_copy", 1);
  g.passes_of_copy = r.PositiveOr(kH200.passes_of_copy, "passes_of_copy", 1);
  // Also of nodes of one GPU: what products lose beside collectives beyond them.
  c.within.slows_products = kNvLink4.slows_products;
  if (r.Has("within")) {
    c.within =
        ReadCollectives(r.Map("within", {"gb_per_s", "latency_us", "all_to_all", "all_gather",
                                         "reduce_scatter", "all_reduce", "slows_products"}));
  } else if (c.gpus_per_node > 1) {
    r.FailMissing("within", fmt::format(": what joins {} GPUs of a node", c.gpus_per_node));
  }
  if (r.Has("between")) {
    const Link between = ReadLink(r.Map("between", {"gb_per_s", "latency_us"}));
    if (c.nodes > 1) c.between = between;
  } else if (c.nodes > 1) {
    r.FailMissing("between", fmt::format(": what joins {} nodes", c.nodes));
  }
  c.sources = r.Text("sources", name);
  return c;
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
  // Reading a pipe or a device may never end.
  std::error_code no_such_file;
  const bool is_file = std::filesystem::is_regular_file(text, no_such_file);
  if (!is_file) {
    CISTRON_THROW(kBadInput,
                  "cluster={}: the cluster is NxDEVICE with one of A100, H100, H200, B200, or the "
                  "path of a YAML file (docs/plan.md); {}. For the memory of one other GPU give "
                  "plan.memory_gib=N",
                  text,
                  std::filesystem::exists(text, no_such_file) ? "this is no regular file"
                                                              : "there is no such file");
  }
  return ParseCluster(io::ReadFile(text), text);
}

}  // namespace cistron::train
