#include "apps/cistron/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/cistron/command.h"
#include "cistron/base/error.h"
#include "cistron/train/memory_fit.h"
#include "cistron/train/progress.h"
#include "cistron/train/rank_simulation.h"
#include "cistron/train/value_range.h"

namespace cistron::app {
namespace {

using train::BytesText;
using train::PlannedLayout;
using train::Sharding;

// Seconds. docs/plan.md compares steps below it with measurements.
constexpr double kShortStep = 0.02;

std::string Parts(const train::MemoryPlan& plan, train::MemoryKind kind) {
  std::string text;
  int shown = 0;
  for (const train::MemoryTerm& t : plan.terms) {
    if (t.kind != kind || shown++ >= 3) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", t.name, BytesText(t.bytes));
  }
  return text;
}

std::string Seconds(double seconds) {
  return seconds >= 1 ? fmt::format("{:.2f} s", seconds) : fmt::format("{:.1f} ms", seconds * 1e3);
}

std::string Bytes(double bytes) {
  return BytesText(static_cast<std::int64_t>(bytes));
}

// Of one GPU.
double TokensPerSecond(const PlannedLayout& l) {
  const std::int64_t tokens = l.problem.RankTokens();
  return static_cast<double>(tokens) / l.time->Total();
}

const char* WhereParametersAre(const PlannedLayout& l) {
  return l.problem.memory.sharding == Sharding::kFull ? "full" : "none";
}

void PrintTraffic(const train::StepTime& t) {
  if (t.collectives.empty()) return;
  fmt::print("a GPU sends in a step {:>16} {:>12} {:>10} {:>10}\n", "within node", "beyond", "time",
             "not hidden");
  for (const auto& c : t.collectives) {
    fmt::print("  {:<26} {:>10} {:>12} {:>10} {:>10}\n", Name(c.kind), Bytes(c.bytes.within),
               Bytes(c.bytes.between), Seconds(c.seconds), Seconds(c.exposed));
  }
}

void PrintTime(const PlannedLayout& l, const train::Cluster& cluster) {
  if (!l.time) {
    fmt::print("time of a step: not predicted; rates are known for bf16 on GPUs alone\n");
    return;
  }
  const train::StepTime& t = *l.time;
  PrintTraffic(t);
  fmt::print(
      "time of a step: {}, {} tokens a second and GPU\n  experts {}, dense products {}, attention "
      "{}, passes over memory {}, update {}, communication {} of {}",
      Seconds(t.Total()), train::FormatCount(TokensPerSecond(l)), Seconds(t.experts),
      Seconds(t.dense), Seconds(t.attention), Seconds(t.passes), Seconds(t.optimizer),
      Seconds(t.Exposed()), Seconds(t.Communication()));
  fmt::print("{}\n",
             t.slowed > 0 ? fmt::format(", which slows products by {}", Seconds(t.slowed)) : "");
  if (t.Compute() < kShortStep) {
    fmt::print(
        "  so short a step is bound by launches and small products, which are not predicted\n");
  }
  fmt::print("  rates: {}\n", cluster.sources);
  if (l.problem.memory.Ranks() == 1) return;
  fmt::print(
      "  assumed: routing is even; dispatch and combine hide behind nothing, gradients behind "
      "backward of the\n  last micro-batch but for its last layer's, gathered parameters behind "
      "all products\n");
}

void PrintLayouts(const std::vector<PlannedLayout>& layouts, const train::Cluster& cluster) {
  if (layouts.size() < 2) return;
  fmt::print(
      "layouts, best first; of the {} of a GPU {} are the device's own, beside what is in the "
      "column\n",
      BytesText(cluster.memory_bytes), BytesText(train::kDeviceReserve));
  fmt::print("  {:>11} {:>11} {:>14} {:>14} {:>10} {:>15} {:>14}\n", "parallel.dp", "parallel.ep",
             "parallel.shard", "memory", "step", "tokens/s, GPU", "communication");
  for (const PlannedLayout& l : layouts) {
    const train::MemoryProblem& p = l.problem.memory;
    fmt::print("  {:>11} {:>11} {:>14} {:>14}", p.dp, p.ep, WhereParametersAre(l),
               BytesText(l.memory.peak_bytes));
    if (!l.fits) {
      fmt::print("  does not fit: {}\n", train::LargestTerms(l.memory, 2));
    } else if (l.time) {
      fmt::print(" {:>10} {:>15} {:>13.0f}%\n", Seconds(l.time->Total()),
                 train::FormatCount(TokensPerSecond(l)), 100 * l.time->Lost() / l.time->Total());
    } else {
      fmt::print("\n");
    }
  }
}

void PrintSimulation(const PlannedLayout& l, const train::Cluster& cluster) {
  const train::Simulation s = train::SimulateStep(l.problem, cluster);
  const train::StepTime plan = *train::PredictStep(s.problem, cluster);
  train::MemoryProblem exact = s.problem.memory;
  exact.row_capacity = 1;
  train::LinkBytes planned;
  for (const auto& c : plan.collectives) {
    planned.within += c.bytes.within;
    planned.between += c.bytes.between;
  }
  train::ValueRange sent_within, sent_between, received_within, received_between, seconds, memory,
      rows;
  for (const train::SimulatedRank& rank : s.ranks) {
    sent_within.Add(rank.sent.within);
    sent_between.Add(rank.sent.between);
    received_within.Add(rank.received.within);
    received_between.Add(rank.received.between);
    seconds.Add(rank.seconds);
    memory.Add(static_cast<double>(rank.peak_bytes));
    rows.Add(rank.most_rows);
  }
  fmt::print(
      "simulated: {} ranks, a step of one micro-batch, message by message; nothing overlaps\n"
      "  {:<34} {:>10} {:>10} {:>10} {:>10}\n",
      s.ranks.size(), "", "planned", "mean", "least", "most");
  const auto line = [](const char* what, double expected, const train::ValueRange& r,
                       const auto& text) {
    fmt::print("  {:<34} {:>10} {:>10} {:>10} {:>10}\n", what, text(expected), text(r.Mean()),
               text(r.least), text(r.most));
  };
  line("sent within the node", planned.within, sent_within, Bytes);
  line("received within the node", planned.within, received_within, Bytes);
  line("sent beyond", planned.between, sent_between, Bytes);
  line("received beyond", planned.between, received_between, Bytes);
  line("time", plan.Compute() + plan.Communication(), seconds, Seconds);
  line("memory, buffers as long as needed",
       static_cast<double>(train::PlanMemory(exact).peak_bytes), memory, Bytes);
  line("rows of experts by rows sent, most", 1, rows,
       [](double value) { return fmt::format("{:.3f}", value); });
  fmt::print("  {} of {} buffers for {} times the rows sent are too short\n", s.overflows,
             static_cast<std::int64_t>(s.ranks.size()) * s.problem.memory.model.num_hidden_layers,
             s.problem.memory.row_capacity);
}

}  // namespace

std::string LayoutsJson(const train::StepProblem& problem, const train::Cluster& cluster) {
  using nlohmann::ordered_json;
  const std::int64_t room = cluster.memory_bytes - train::kDeviceReserve;
  ordered_json layouts = ordered_json::array();
  for (const PlannedLayout& l : train::RankLayouts(problem, cluster, room)) {
    const train::MemoryProblem& p = l.problem.memory;
    ordered_json j = {{"dp", p.dp},
                      {"ep", p.ep},
                      {"shard", WhereParametersAre(l)},
                      {"fits", l.fits},
                      {"peak_bytes", l.memory.peak_bytes},
                      // What of it a run's own figure does not hold.
                      {"reserved_bytes", p.Ranks() > 1 ? train::kCollectiveReserve : 0},
                      {"largest", train::LargestTerms(l.memory, 3)}};
    if (l.time) {
      j["step_ms"] = l.time->Total() * 1e3;
      j["communication_ms"] = l.time->Lost() * 1e3;
      j["tokens_per_s_gpu"] = TokensPerSecond(l);
    }
    layouts.push_back(std::move(j));
  }
  return ordered_json{{"cluster", cluster.name},
                      {"tokens", problem.GlobalTokens()},
                      {"layouts", std::move(layouts)}}
      .dump();
}

void PrintMemory(const train::MemoryProblem& problem, const train::MemoryPlan& plan) {
  for (int k = 0; k < train::kMemoryKinds; ++k) {
    const auto kind = static_cast<train::MemoryKind>(k);
    const bool of_ranks = kind >= train::MemoryKind::kDispatch;
    if (of_ranks && plan.Of(kind) == 0) {
      if (kind == train::MemoryKind::kDispatch && plan.most_dispatch_bytes > 0) {
        fmt::print("  {:<13} {:>10}  ({} at another moment)\n", Name(kind), "0",
                   BytesText(plan.most_dispatch_bytes));
      }
      continue;
    }
    fmt::print("  {:<13} {:>10}  {}\n", Name(kind), BytesText(plan.Of(kind)), Parts(plan, kind));
  }
  fmt::print("  {:<13} {:>10}  in {}\n", "peak", BytesText(plan.peak_bytes), plan.where);
  const DType type = train::GradientDType(problem.precision, problem.states, problem.gradients,
                                          problem.whole_batch);
  const std::string text = train::GradientText(type, problem.one_micro_batch);
  if (!text.empty()) fmt::print("{}\n", text);
}

int ReportCluster(const train::StepProblem& problem, const train::Cluster& cluster, bool simulate) {
  const std::int64_t room = cluster.memory_bytes - train::kDeviceReserve;
  const std::vector<PlannedLayout> layouts = train::RankLayouts(problem, cluster, room);
  const train::MemoryProblem& given = problem.memory;
  const auto asked = std::find_if(layouts.begin(), layouts.end(), [&](const PlannedLayout& l) {
    return l.problem.memory.dp == given.dp && l.problem.memory.ep == given.ep &&
           l.problem.memory.sharding == given.sharding;
  });
  const PlannedLayout& shown = asked == layouts.end() ? layouts.front() : *asked;
  const train::MemoryProblem& p = shown.problem.memory;
  if (simulate && (!shown.time || p.Ranks() == 1)) {
    CISTRON_THROW(kBadInput, "--simulate: {}",
                  p.Ranks() == 1 ? std::string("one GPU has none to send to; name a larger cluster")
                                 : fmt::format("times are known for precision=bf16 alone, not {}",
                                               Name(p.precision)));
  }
  fmt::print("model: {} parameters, {} a token; {} tokens a step\n",
             train::FormatCount(static_cast<double>(model::ParameterCount(p.model))),
             train::FormatCount(static_cast<double>(model::ActiveParameterCount(p.model))),
             shown.problem.GlobalTokens());
  fmt::print("cluster: {}, {} node{} of {} GPU{} with {}\n", cluster.name, cluster.nodes,
             cluster.nodes == 1 ? "" : "s", cluster.gpus_per_node,
             cluster.gpus_per_node == 1 ? "" : "s", BytesText(cluster.memory_bytes));
  fmt::print(
      "layout{}: parallel.dp={} parallel.ep={} parallel.shard={}, {} micro-batch{} of {} "
      "tokens on each GPU\n",
      asked == layouts.end() ? " (the best)" : "", p.dp, p.ep, WhereParametersAre(shown),
      shown.problem.MicroSteps(), shown.problem.MicroSteps() == 1 ? "" : "es", p.tokens);
  PrintMemory(p, shown.memory);
  const double percent =
      100 * static_cast<double>(shown.memory.peak_bytes) / static_cast<double>(room);
  fmt::print("{}: {:.0f}% of {} (of which {} are the device's own)\n",
             shown.fits ? "fits" : "does not fit", percent, BytesText(cluster.memory_bytes),
             BytesText(train::kDeviceReserve));
  if (!shown.fits) {
    fmt::print("largest: {}\n{}\n", train::LargestTerms(shown.memory, 3),
               train::AdviceToFit(p, room));
  }
  PrintTime(shown, cluster);
  if (simulate) PrintSimulation(shown, cluster);
  PrintLayouts(layouts, cluster);
  return shown.fits ? kOk : kBadUsage;
}

}  // namespace cistron::app
