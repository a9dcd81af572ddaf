// Clusters: the known ones against their sources, files, and what is said of bad ones.
#include "cistron/train/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

using ::testing::HasSubstr;

// The bus bandwidths that were measured come out of the line drawn through them.
TEST(Cluster, LinksOfTwoH200GiveWhatWasMeasured) {
  const Cluster c = FindCluster("2xH200");
  const struct {
    Link link;
    double sent_of_size, at_64, at_256;  // GB/s
  } rows[] = {{c.within.all_to_all, 0.5, 188, 263},
              {c.within.all_gather, 0.5, 176, 229},
              {c.within.reduce_scatter, 0.5, 166, 216},
              {c.within.all_reduce, 1.0, 238, 285}};
  for (const auto& row : rows) {
    for (const auto& [mib, gb_per_s] : {std::pair{64, row.at_64}, std::pair{256, row.at_256}}) {
      const double sent = row.sent_of_size * mib * 0x1p20;
      EXPECT_NEAR(sent / row.link.Seconds(sent) * 1e-9, gb_per_s, 1e-6 * gb_per_s);
    }
    // By themselves small messages were seen to take 0.05 to 0.08 ms.
    EXPECT_GT(row.link.latency_s, 50e-6);
    EXPECT_LT(row.link.latency_s, 80e-6);
  }
}

TEST(Cluster, KnownOnesByNumberAndName) {
  const Cluster one = FindCluster("1xH200");
  EXPECT_EQ(one.Ranks(), 1);
  EXPECT_EQ(one.memory_bytes, std::int64_t{143771} << 20);
  const Cluster many = FindCluster("64xB200");
  EXPECT_EQ(many.nodes, 8);
  EXPECT_EQ(many.gpus_per_node, 8);
  EXPECT_THAT(many.sources, HasSubstr("not measured"));
  // The parts of the data sheet that an H200 reaches.
  EXPECT_DOUBLE_EQ(many.rates.grouped_flops, one.rates.grouped_flops * (2250.0 / 989));
  EXPECT_DOUBLE_EQ(many.within.all_to_all.bytes_per_s, 2 * one.within.all_to_all.bytes_per_s);
  EXPECT_EQ(FindCluster("8xH100").rates.product_flops, one.rates.product_flops);
}

std::string ErrorOf(const auto& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kBadInput);
    return e.message();
  }
  return "no error";
}

TEST(Cluster, UnknownOnesAreRefused) {
  for (const char* text : {"8xH800", "H200", "0xH200", "-8xH200", "8.5xH200", "", "/", "x"}) {
    EXPECT_THAT(ErrorOf([&] { FindCluster(text); }), HasSubstr("NxDEVICE with one of A100"))
        << text;
  }
  EXPECT_THAT(ErrorOf([] { FindCluster("12xH200"); }), HasSubstr("the nearest is 16xH200"));
}

constexpr const char* kFile = R"(
name: mine
nodes: 4
gpus_per_node: 2
memory_gib: 48
product_tflops: 100
attention_tflops: 50
copy_gb_per_s: 800
within: {gb_per_s: 25, latency_us: 10, all_to_all: {gb_per_s: 20, latency_us: 15}}
between: {gb_per_s: 12.5, latency_us: 30}
)";

TEST(Cluster, AFileSaysItAll) {
  const Cluster c = ParseCluster(kFile, "mine.yaml");
  EXPECT_EQ(c.name, "mine");
  EXPECT_EQ(c.Ranks(), 8);
  EXPECT_EQ(c.memory_bytes, std::int64_t{48} << 30);
  EXPECT_EQ(c.rates.grouped_flops, 100e12);
  EXPECT_EQ(c.rates.attention_backward_flops, 50e12);
  EXPECT_EQ(c.within.all_reduce.bytes_per_s, 25e9);
  EXPECT_EQ(c.within.all_to_all.bytes_per_s, 20e9);
  EXPECT_DOUBLE_EQ(c.within.all_to_all.latency_s, 15e-6);
  EXPECT_DOUBLE_EQ(c.between.Seconds(12.5e9), 1 + 30e-6);
}

TEST(Cluster, AFileWithFaultsNamesThem) {
  const auto error = [](const std::string& from, const std::string& to) {
    std::string text = kFile;
    text.replace(text.find(from), from.size(), to);
    return ErrorOf([&] { ParseCluster(text, "mine.yaml"); });
  };
  EXPECT_THAT(error("memory_gib: 48", ""), HasSubstr("mine.yaml: the key 'memory_gib' is missing"));
  EXPECT_THAT(error("nodes: 4", "nodes: 2.5"), HasSubstr("nodes must be a whole number"));
  EXPECT_THAT(error("memory_gib: 48", "memory_gib: -1"), HasSubstr("greater than 0"));
  EXPECT_THAT(error("memory_gib: 48", "memory_gib: .inf"), HasSubstr("greater than 0"));
  EXPECT_THAT(error("memory_gib: 48", "memory_gib: [1]"), HasSubstr("greater than 0"));
  EXPECT_THAT(error("memory_gib", "memory_gb"), HasSubstr("no key 'memory_gb'; known: name, "));
  EXPECT_THAT(error("between:", "betwixt:"), HasSubstr("no key 'betwixt'"));
  EXPECT_THAT(error("between: {gb_per_s: 12.5, latency_us: 30}", ""),
              HasSubstr("'between' is missing: what joins 4 nodes"));
  EXPECT_THAT(error("{gb_per_s: 12.5, latency_us: 30}", "fast"),
              HasSubstr("mine.yaml: between: this is no map"));
  EXPECT_THAT(error("latency_us: 15", "latency: 15"), HasSubstr("all_to_all: there is no key"));
  EXPECT_THAT(ErrorOf([] { ParseCluster("[1, 2", "broken.yaml"); }), HasSubstr("broken.yaml"));
}

}  // namespace
}  // namespace cistron::train
