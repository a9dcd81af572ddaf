// Clusters: the known ones against their sources, files, and what is said of bad ones.
#include "cistron/train/cluster.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
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

std::string With(const std::string& from, const std::string& to) {
  std::string text = kFile;
  text.replace(text.find(from), from.size(), to);
  return text;
}

TEST(Cluster, AFileWithFaultsNamesThem) {
  const struct {
    std::string from, to, message;
  } rows[] = {
      {"memory_gib: 48", "", "mine.yaml:2: the key 'memory_gib' is missing"},
      {"nodes: 4", "nodes: 2.5",
       "mine.yaml:3: nodes is 2.5; it must be a whole number from 1 to 1000000"},
      {"nodes: 4", "nodes: 0",
       "mine.yaml:3: nodes is 0; it must be a whole number from 1 to 1000000"},
      {"memory_gib: 48", "memory_gib: -1",
       "mine.yaml:5: memory_gib is -1; it must be a number greater than 0"},
      {"memory_gib: 48", "memory_gib: .nan",
       "mine.yaml:5: memory_gib is .nan; it must be a number greater than 0"},
      {"memory_gib: 48", "memory_gib: 48 GiB",
       "mine.yaml:5: memory_gib is 48 GiB; it must be a number greater than 0"},
      {"memory_gib: 48", "memory_gib: .inf",
       "mine.yaml:5: memory_gib is .inf; it must be a number up to 1000000"},
      {"memory_gib: 48", "memory_gib: 1e30",
       "mine.yaml:5: memory_gib is 1e30; it must be a number up to 1000000"},
      {"memory_gib: 48", "memory_gib: [1]",
       "mine.yaml:5: memory_gib is a list; it must be a number greater than 0"},
      {"memory_gib: 48",
       "memory_gib:", "mine.yaml:5: memory_gib is empty; it must be a number greater than 0"},
      {"attention_tflops: 50", "attention_tflops: 1e300",
       "mine.yaml:7: attention_tflops is 1e300; it must be a number up to 1000000000"},
      {"name: mine", "name: {}", "mine.yaml:2: name is a map; it must be text"},
      {"name: mine", "optimizer_of_copy: 1.5",
       "mine.yaml:2: optimizer_of_copy is 1.5; it must be a number up to 1"},
      {"name: mine", "passes_of_copy: 0",
       "mine.yaml:2: passes_of_copy is 0; it must be a number greater than 0"},
      {"within: {", "within: {slows_products: 1.1, ",
       "mine.yaml:9: within: slows_products is 1.1; it must be a number from 0 to 1"},
      {"within: {", "within: {slows_products: -0.1, ",
       "mine.yaml:9: within: slows_products is -0.1; it must be a number from 0 to 1"},
      {"gb_per_s: 25", "gb_per_s: -3",
       "mine.yaml:9: within: gb_per_s is -3; it must be a number greater than 0"},
      {"latency_us: 15", "latency_us: 0",
       "mine.yaml:9: within: all_to_all: latency_us is 0; it must be a number greater than 0"},
      {", latency_us: 15", "", "mine.yaml:9: within: all_to_all: the key 'latency_us' is missing"},
      {"latency_us: 15", "latency: 15",
       "mine.yaml:9: within: all_to_all: there is no key 'latency'; known: gb_per_s, latency_us"},
      {"between: {gb_per_s: 12.5, latency_us: 30}", "",
       "mine.yaml:2: the key 'between' is missing: what joins 4 nodes"},
      {"{gb_per_s: 12.5, latency_us: 30}", "fast", "mine.yaml:10: between: this is no map of keys"},
      {"name: mine", "nodes: 3", "mine.yaml:3: nodes is given twice in this file"},
      {"gb_per_s: 20", "gb_per_s: 20, gb_per_s: 21",
       "mine.yaml:9: within: all_to_all: gb_per_s is given twice in this file"},
      {"name: mine", "[1]: mine", "mine.yaml:2: a key must be a plain name"},
      {"copy_gb_per_s: 800", "copy_gb_per_s: 800\n---",
       "mine.yaml:10: a second document begins here; a cluster is one: remove the `---` before it"},
  };
  for (const auto& row : rows) {
    EXPECT_EQ(ErrorOf([&] { ParseCluster(With(row.from, row.to), "mine.yaml"); }), row.message);
  }
  EXPECT_THAT(ErrorOf([] { ParseCluster(With("memory_gib", "memory_gb"), "mine.yaml"); }),
              HasSubstr("mine.yaml:5: there is no key 'memory_gb'; known: name, "));
  EXPECT_THAT(ErrorOf([] { ParseCluster("nodes: 1\n[1, 2", "broken.yaml"); }),
              HasSubstr("broken.yaml:2: this is not YAML: "));
  EXPECT_EQ(ErrorOf([] { ParseCluster("", "empty.yaml"); }), "empty.yaml: this is no map of keys");
}

TEST(Cluster, WhatProductsLoseBesideCollectives) {
  const auto slows = [](const std::string& from, const std::string& to) {
    return ParseCluster(With(from, to), "mine.yaml").within.slows_products;
  };
  const double usual = FindCluster("8xH200").within.slows_products;
  EXPECT_GT(usual, 0);
  EXPECT_EQ(slows("", ""), usual);
  EXPECT_EQ(slows("within: {", "within: {slows_products: 0, "), 0);
  EXPECT_EQ(slows("within: {", "within: {slows_products: 1, "), 1);
  // Nodes of one GPU have collectives too, beyond them.
  std::string single = With("gpus_per_node: 2", "gpus_per_node: 1");
  EXPECT_EQ(ParseCluster(single, "mine.yaml").within.slows_products, usual);
  single.erase(single.find("within:"), single.find("between:") - single.find("within:"));
  EXPECT_EQ(ParseCluster(single, "mine.yaml").within.slows_products, usual);
}

TEST(Cluster, AsMuchMemoryAsMayBeGiven) {
  EXPECT_EQ(ParseCluster(With("memory_gib: 48", "memory_gib: 1e6"), "mine.yaml").memory_bytes,
            std::int64_t{1'000'000} << 30);
}

// Reading from these would not end.
TEST(Cluster, OnlyRegularFilesAreRead) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / fmt::format("cluster_test.{}", getpid());
  std::filesystem::create_directories(folder);
  const std::string pipe = folder / "pipe", file = folder / "mine.yaml", link = folder / "link";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::ofstream(file) << kFile;
  std::filesystem::create_symlink(file, link);
  for (const std::string& path : {pipe, std::string("/dev/zero"), folder.string()}) {
    EXPECT_THAT(ErrorOf([&] { FindCluster(path); }), HasSubstr("this is no regular file")) << path;
  }
  EXPECT_THAT(ErrorOf([&] { FindCluster(folder / "none"); }), HasSubstr("there is no such file"));
  EXPECT_EQ(FindCluster(file).name, "mine");
  EXPECT_EQ(FindCluster(link).name, "mine");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cistron::train
