#include "cistron/train/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <fmt/format.h>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/train/report_charts.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ReportTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(::testing::TempDir()) /
                 fmt::format("report_test_{}",
                             ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  void TearDown() override {
    if (std::getenv("CISTRON_KEEP_TEST_FILES") == nullptr) fs::remove_all(directory_);
  }
  void Write(const std::string& name, const std::string& content) {
    std::ofstream(directory_ / name, std::ios::binary) << content;
  }
  // The message of the error that reading the directory throws.
  std::string ReadError() {
    try {
      ReadRunRecord(directory_);
    } catch (const Error& error) {
      return error.message();
    }
    return "no error";
  }
  fs::path directory_;
};

MarkovBaseline ExampleBaseline() {
  MarkovBaseline baseline;
  baseline.train_bases = 4407691;
  baseline.heldout_bases = 231984;
  baseline.scores = {{6, false, MarkovSmoothing::kAdd, 0, 1.9377},
                     {7, true, MarkovSmoothing::kAdd, 0, 1.9362},
                     {13, true, MarkovSmoothing::kInterpolated, 16, 1.9247}};
  return baseline;
}

// A run that looks like one: loss falls from ln 256, experts drift apart.
std::string ExampleMetrics(int steps, int layers, int experts) {
  const RandomStream random(1, "report_test");
  std::uint64_t draw = 0;
  const auto normal = [&] { return random.Normal(draw++); };
  std::string text;
  for (int step = 1; step <= steps; ++step) {
    const double t = static_cast<double>(step) / steps;
    const double bits =
        1.915 + 0.075 * std::exp(-4 * t) + 6.0 * std::exp(-static_cast<double>(step) / 8);
    const double lr = t < 0.05 ? t / 0.05 : 0.51 + 0.49 * std::cos(3.14159 * (t - 0.05) / 0.95);
    const double loss = (bits + 0.012 * normal()) * std::log(2.0), aux_noise = std::abs(normal());
    const double norm_noise = std::abs(normal()), milliseconds = 146.0 + 4 * normal();
    text += fmt::format(
        R"({{"step": {}, "tokens_seen": {}, "loss": {:.6f}, "aux_loss": {:.6f}, "grad_norm": {:.6f}, )"
        R"("lr": {:.8f}, "step_ms": {:.2f}, "tokens_per_s": {:.1f}, "unpadded_tokens_per_s": {:.1f}, )"
        R"("mfu": null, "memory_peak_bytes": {}, "expert_load": [)",
        step, step * 2048, loss, 1.0 + 0.05 * std::exp(-3 * t) + 0.004 * aux_noise,
        0.35 + 2.5 * std::exp(-step / 20.0) + 0.05 * norm_noise, 0.004 * lr, milliseconds,
        2048e3 / milliseconds, 2048e3 / milliseconds, std::int64_t{420} << 20);
    for (int l = 0; l < layers; ++l) {
      std::string row;
      double sum = 0;
      std::vector<double> load;
      for (int e = 0; e < experts; ++e) {
        load.push_back(std::exp(0.9 * t * std::sin(e * 2.1 + l * 1.3) + 0.05 * normal()));
        sum += load.back();
      }
      for (const double share : load)
        row += fmt::format("{}{:.5f}", row.empty() ? "" : ",", share / sum);
      text += fmt::format("{}[{}]", l > 0 ? "," : "", row);
    }
    text += "]";
    if (step % std::max(1, steps / 6) == 0) {
      const double heldout = bits + 0.004;
      text += fmt::format(
          ", \"heldout_loss\": {:.6f}, \"heldout_bits_per_base\": {:.6f}, \"heldout_bases\": 65280",
          heldout * std::log(2.0), heldout);
    }
    text += "}\n";
  }
  return text;
}

std::string ExampleExpertBases(int layers, int experts) {
  std::string counts;
  for (int l = 0; l < layers; ++l) {
    std::string layer;
    for (int e = 0; e < experts; ++e) {
      std::string row;
      for (int b = 0; b < 4; ++b) {
        row += fmt::format("{}{:.0f}", row.empty() ? "" : ",",
                           14000 * std::exp(1.5 * std::sin(e * 1.7 + b * 2.9 + l)));
      }
      layer += fmt::format("{}[{}]", layer.empty() ? "" : ",", row);
    }
    counts += fmt::format("{}[{}]", counts.empty() ? "" : ",", layer);
  }
  return "{\"bases\": [\"A\", \"C\", \"G\", \"T\"], \"counts\": [" + counts + "]}";
}

TEST_F(ReportTest, WholeRun) {
  Write("metrics.jsonl", ExampleMetrics(1221, 4, 8));
  Write("config.yaml", "seed: 1\nname: <b>&\n");
  Write("final.json",
        R"({"heldout_loss": 1.3315, "heldout_bits_per_base": 1.9210, "heldout_bases": 231000})");
  Write("expert_bases.json", ExampleExpertBases(4, 8));
  Write("machine.json", R"({"cpu": "AMD EPYC 9V74", "threads": 2, "precision": "fp32"})");
  WriteBaseline(directory_ / "baseline.json", ExampleBaseline());

  const fs::path path = WriteReport(directory_);
  EXPECT_EQ(path, directory_ / "report.html");
  std::ifstream file(path);
  const std::string html((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(html, HasSubstr("1.9210 bits per base"));
  EXPECT_THAT(html, HasSubstr("0.0037 below the best Markov model"));
  EXPECT_THAT(html, HasSubstr("layer 3: expert"));
  EXPECT_THAT(html, HasSubstr("AMD EPYC 9V74"));
  EXPECT_THAT(html, HasSubstr("name: &lt;b&gt;&amp;"));
  EXPECT_THAT(html, HasSubstr("four equal bases: 2"));
  // Self-contained: nothing is fetched and no script runs.
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr("src=")));
  EXPECT_THAT(html, Not(HasSubstr("href=")));
  EXPECT_THAT(html, Not(HasSubstr("@import")));
  EXPECT_THAT(html, Not(HasSubstr(">nan")));

  const RunRecord record = ReadRunRecord(directory_);
  EXPECT_EQ(record.steps.size(), 1221u);
  EXPECT_EQ(record.layers(), 4u);
  EXPECT_EQ(record.experts(), 8u);
  const std::string svg = RenderLearningCurve(record);
  EXPECT_EQ(svg.rfind("<svg", 0), 0u);
  if (std::getenv("CISTRON_KEEP_TEST_FILES") != nullptr) Write("curve.svg", svg);
}

TEST_F(ReportTest, IdleExpertsAreCounted) {
  Write("metrics.jsonl",
        "{\"step\": 1, \"loss\": 5, \"expert_load\": [[0.999, 0.001], [0.5, 0.5]]}\n");
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, AllOf(HasSubstr("<b>1 of 4</b><span>idle experts"),
                          HasSubstr("1 of 4 experts is idle: it gets less than 2%")));
}

TEST_F(ReportTest, ManyExpertsAndLayers) {
  Write("metrics.jsonl", ExampleMetrics(60, 12, 64));
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, HasSubstr("mean and range of 12 layers"));
  EXPECT_LT(html.size(), std::size_t{6} << 20);
}

TEST_F(ReportTest, BareMetricsGiveAPageThatSaysWhatIsMissing) {
  Write("metrics.jsonl", "{\"step\": 1, \"loss\": 5.5}\n");
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, HasSubstr("No held-out value"));
  EXPECT_THAT(html, HasSubstr("no expert load"));
  EXPECT_THAT(html, HasSubstr("no expert_bases.json"));
  EXPECT_THAT(html, HasSubstr("no config.yaml"));
  EXPECT_THAT(html, HasSubstr("nats a token"));

  Write("metrics.jsonl", "{\"step\": 1}\n");
  EXPECT_THAT(RenderReport(ReadRunRecord(directory_)), HasSubstr("No loss has been logged"));
}

// A short run lies above what a long one shows: the axis follows it.
TEST_F(ReportTest, ShortRunIsInTheChart) {
  std::string metrics;
  for (int step = 1; step <= 4; ++step) {
    metrics += fmt::format("{{\"step\": {}, \"loss\": {}}}\n", step, 5.6 - 0.5 * step);
  }
  Write("metrics.jsonl", metrics);
  Write("config.yaml", "data:\n  alphabet: dna\n");
  Write("final.json",
        R"({"heldout_loss": 3.5, "heldout_bits_per_base": 5.05, "heldout_bases": 9})");
  const RunRecord record = ReadRunRecord(directory_);
  const auto chart = LearningCurve(record);
  ASSERT_TRUE(chart && chart->y_max);
  EXPECT_GT(*chart->y_max, 5.05);
  EXPECT_THAT(RenderLearningCurve(record), AllOf(HasSubstr(">3</text>"), Not(HasSubstr(">2.5<"))));
}

TEST_F(ReportTest, ProteinIsToldInResidues) {
  Write("metrics.jsonl", ExampleMetrics(30, 1, 4));
  Write("config.yaml", "data:\n  alphabet: protein\n");
  Write("final.json",
        R"({"heldout_loss": 2.85, "heldout_bits_per_base": 4.11, "heldout_bases": 100})");
  WriteBaseline(directory_ / "baseline.json", ExampleBaseline());
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, AllOf(HasSubstr("4.1100 bits per residue"), HasSubstr("residues scored")));
  EXPECT_THAT(html, HasSubstr("<p class=\"muted\">No Markov line: Markov models here are of four "
                              "bases, for dna and rna, not for protein.</p>"));
  EXPECT_THAT(html, Not(AnyOf(HasSubstr("Markov model<"), HasSubstr("All Markov models"),
                              HasSubstr("per base"), HasSubstr("Two bits"))));
}

TEST_F(ReportTest, UniformLineIsThatOfTheAlphabet) {
  const auto line = [this](const char* alphabet, double bits) {
    Write("metrics.jsonl", fmt::format("{{\"step\": 1, \"loss\": {}}}\n", bits * std::log(2.0)));
    Write("config.yaml", fmt::format("data:\n  alphabet: {}\n", alphabet));
    const auto chart = LearningCurve(ReadRunRecord(directory_));
    return chart && !chart->references.empty() ? chart->references[0].label : std::string();
  };
  EXPECT_EQ(line("rna", 1.9), "four equal bases: 2");
  EXPECT_EQ(line("protein", 4.2), "20 equal residues: 4.32");
  EXPECT_EQ(line("bytes", 6), "256 equal bytes: 8");
  EXPECT_EQ(line("bytes", 2), "");  // far above the run
}

TEST_F(ReportTest, RunThatHoldsNothingOutSaysSo) {
  Write("metrics.jsonl", "{\"step\": 1, \"loss\": 1.4}\n{\"step\": 2, \"loss\": 1.38}\n");
  Write("config.yaml", "data:\n  split: none\n");
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, HasSubstr("This run holds nothing out (data.split=none)"));
  EXPECT_THAT(html, Not(AnyOf(HasSubstr("Markov"), HasSubstr("expert_bases.json"))));
}

TEST_F(ReportTest, LossesOfEachLayerAreDrawnWhenTrained) {
  Write("metrics.jsonl", ExampleMetrics(3, 1, 2));
  EXPECT_THAT(RenderReport(ReadRunRecord(directory_)),
              Not(AnyOf(HasSubstr("z-loss"), HasSubstr("Load-balancing loss of each layer"))));
  Write("metrics.jsonl",
        "{\"step\": 1, \"loss\": 5, \"layer_aux_loss\": [1.1, 1.2], \"z_loss\": [3, 4]}\n"
        "{\"step\": 2, \"loss\": 4, \"layer_aux_loss\": [1.0, null], \"z_loss\": [2, 3]}\n");
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, AllOf(HasSubstr("Router z-loss of each layer"),
                          HasSubstr("Load-balancing loss of each layer"), HasSubstr("layer 1")));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

// A sample on the way and the whole at the end are not one line.
TEST_F(ReportTest, WholeHeldOutPartIsADiamondOfItsOwn) {
  Write("metrics.jsonl",
        "{\"step\": 1, \"loss\": 1.4, \"heldout_bits_per_base\": 1.95, \"heldout_bases\": 50}\n"
        "{\"step\": 2, \"loss\": 1.3, \"heldout_bits_per_base\": 1.91, \"heldout_bases\": 99}\n");
  Write("final.json",
        R"({"heldout_loss": 1.32, "heldout_bits_per_base": 1.91, "heldout_bases": 99})");
  const RunRecord record = ReadRunRecord(directory_);
  const auto chart = LearningCurve(record);
  ASSERT_TRUE(chart);
  const Series& whole = chart->series.back();
  EXPECT_TRUE(whole.diamonds);
  EXPECT_EQ(whole.y, std::vector<double>{1.91});
  const Series& sampled = chart->series[chart->series.size() - 2];
  EXPECT_EQ(sampled.name, "held-out part, a sample");
  EXPECT_EQ(sampled.y, std::vector<double>{1.95});
  EXPECT_THAT(RenderReport(record), HasSubstr("the diamond at the end is the whole of it"));
}

TEST_F(ReportTest, WorseThanTheBaselineIsSaid) {
  Write("metrics.jsonl", "{\"step\": 1, \"loss\": 1.4, \"heldout_bits_per_base\": 1.95}\n");
  WriteBaseline(directory_ / "baseline.json", ExampleBaseline());
  EXPECT_THAT(RenderReport(ReadRunRecord(directory_)),
              HasSubstr("0.0253 above the best Markov model"));
}

TEST_F(ReportTest, NanAndNullAreLeftOut) {
  Write("metrics.jsonl",
        "{\"step\": 1, \"loss\": 5.5, \"grad_norm\": null}\n{\"step\": 2, \"loss\": null}\n"
        "{\"step\": 3, \"loss\": 5.0, \"grad_norm\": 0}\n");
  const std::string html = RenderReport(ReadRunRecord(directory_));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST_F(ReportTest, LastLineCutShortIsLeftOut) {
  const std::string metrics = ExampleMetrics(3, 1, 2);
  Write("metrics.jsonl", metrics.substr(0, metrics.size() - 30));
  const RunRecord record = ReadRunRecord(directory_);
  EXPECT_EQ(record.steps.size(), 2u);
  EXPECT_TRUE(record.partial_last_line);
  EXPECT_THAT(RenderReport(record), HasSubstr("cut short"));
}

TEST_F(ReportTest, StepsRedoneAfterAResumeReplaceTheOldOnes) {
  Write("metrics.jsonl",
        "{\"step\": 1, \"loss\": 5}\n{\"step\": 2, \"loss\": 4}\n{\"step\": 3, \"loss\": 3}\n"
        "{\"step\": 2, \"loss\": 2}\n");
  const RunRecord record = ReadRunRecord(directory_);
  ASSERT_EQ(record.steps.size(), 2u);
  EXPECT_EQ(record.steps[1].loss, 2);
}

TEST_F(ReportTest, BaselineFileKeepsEveryValue) {
  const MarkovBaseline written = ExampleBaseline();
  WriteBaseline(directory_ / "baseline.json", written);
  const MarkovBaseline read = ReadBaseline(directory_ / "baseline.json");
  EXPECT_EQ(read.train_bases, written.train_bases);
  EXPECT_EQ(read.heldout_bases, written.heldout_bases);
  ASSERT_EQ(read.scores.size(), written.scores.size());
  for (std::size_t i = 0; i < read.scores.size(); ++i) {
    EXPECT_EQ(read.scores[i].order, written.scores[i].order);
    EXPECT_EQ(read.scores[i].both_strands, written.scores[i].both_strands);
    EXPECT_EQ(read.scores[i].smoothing, written.scores[i].smoothing);
    EXPECT_EQ(read.scores[i].prior, written.scores[i].prior);
    EXPECT_EQ(read.scores[i].bits_per_base, written.scores[i].bits_per_base);
  }
}

TEST_F(ReportTest, ErrorsNameFileAndLine) {
  EXPECT_THAT(ReadError(), HasSubstr("metrics.jsonl"));
  Write("metrics.jsonl", "");
  EXPECT_THAT(ReadError(), HasSubstr("no step"));
  Write("metrics.jsonl", "\n\n");
  EXPECT_THAT(ReadError(), HasSubstr("no step"));
  Write("metrics.jsonl", "{\"step\": 1}\n{oops}\n{\"step\": 2}\n");
  EXPECT_THAT(ReadError(), HasSubstr("metrics.jsonl:2"));
  Write("metrics.jsonl", "{\"step\": 1, \"loss\": \"low\"}\n");
  EXPECT_THAT(ReadError(), HasSubstr("\"loss\" is string"));
  Write("metrics.jsonl", "[1]\n");
  EXPECT_THAT(ReadError(), HasSubstr("not a JSON object"));
  Write("metrics.jsonl", "{\"step\": 1, \"expert_load\": [[1], [1, 2]]}\n");
  EXPECT_THAT(ReadError(), HasSubstr("expert_load"));
  Write("metrics.jsonl",
        "{\"step\": 1, \"expert_load\": [[1, 2]]}\n{\"step\": 2, \"expert_load\": [[1]]}\n");
  EXPECT_THAT(ReadError(), HasSubstr("metrics.jsonl:2"));
  Write("metrics.jsonl", "{\"step\": 1}\n");
  Write("baseline.json", "{\"train_bases\": 1}");
  EXPECT_THAT(ReadError(), HasSubstr("baseline.json"));
  Write("baseline.json", R"({"train_bases": 1, "heldout_bases": 1, "scores": []})");
  Write("expert_bases.json", R"({"bases": ["A"], "counts": [[[1, 2]]]})");
  EXPECT_THAT(ReadError(), HasSubstr("expert_bases.json"));
  EXPECT_THROW(ReadRunRecord(directory_ / "absent"), Error);
  EXPECT_THROW(RenderReport(RunRecord{}), Error);
}

}  // namespace
}  // namespace cistron::train
