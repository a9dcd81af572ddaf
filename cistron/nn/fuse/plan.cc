#include "cistron/nn/fuse/plan.h"

#include <algorithm>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::nn::fuse {
namespace {

// Ops of `window` whose kinds are those of the pattern, from the first on.
std::size_t MatchingKinds(const Pattern& p, Window window) {
  std::size_t n = 0;
  while (n < p.kinds.size() && n < window.size() && window[n]->kind() == p.kinds[n]) ++n;
  return n;
}

std::string Join(std::span<const std::string_view> kinds) {
  std::string text;
  for (const std::string_view kind : kinds) text += (text.empty() ? "" : " → ") + std::string(kind);
  return text;
}

// Why a pattern whose kinds are nowhere in a row does not fire: the op that ends the longest start.
Verdict NoWindow(const Pattern& p, Window ops) {
  std::size_t best = 0, at = 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const std::size_t n = MatchingKinds(p, ops.subspan(i));
    if (n > best) {
      best = n;
      at = i;
    }
  }
  const std::string wanted = Join(p.kinds);
  if (best == 0) {
    return Verdict::Refuses("Sequential", fmt::format("no op begins {}", wanted),
                            "nothing, unless such layers were meant to be there");
  }
  if (at + best == ops.size()) {
    return Verdict::Refuses(
        ops[at + best - 1]->name(),
        fmt::format("the ops end here, {} wants {} next", wanted, p.kinds[best]),
        fmt::format("put a {} behind it", p.kinds[best]));
  }
  const BasicOp& op = *ops[at + best];
  return Verdict::Refuses(
      op.name(), fmt::format("it is a {}, where {} wants {}", op.kind(), wanted, p.kinds[best]),
      fmt::format("put a {} in its place", p.kinds[best]));
}

// The pattern that has each op; empty: none yet.
using Taken = std::vector<std::string_view>;

// Applies one list to the ops that are still free in `taken`; returns the steps.
std::vector<PlanStep> Apply(std::span<const Pattern> patterns, const char* direction, Window ops,
                            const PlanKey& key, Taken& taken, std::vector<Refusal>& refusals) {
  std::vector<PlanStep> steps;
  for (const Pattern& p : patterns) {
    bool fired = false;
    std::vector<Refusal> refused, not_needed;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const std::size_t n = p.kinds.size();
      if (MatchingKinds(p, ops.subspan(i)) < n) continue;
      const std::span<const std::string_view> owners = std::span(taken).subspan(i, n);
      const auto owner = std::find_if(owners.begin(), owners.end(),
                                      [](std::string_view name) { return !name.empty(); });
      if (owner != owners.end()) {
        const std::string& op = ops[i + static_cast<std::size_t>(owner - owners.begin())]->name();
        not_needed.push_back({p.name, direction,
                              Verdict::Refuses(op, fmt::format("{} has these ops", *owner), ""),
                              /*kinds_match=*/false, /*needed=*/false});
        continue;
      }
      const Window window = ops.subspan(i, n);
      PlanKey here = key;
      here.input_gradient = key.input_gradient || i > 0;  // of the op before
      Verdict verdict = key.fuse ? p.matches(window, std::span(key.recipes).subspan(i, n), here)
                                 : Verdict::Refuses(window[0]->name(), "fusion is switched off",
                                                    "call EnableFusion(true)");
      if (!verdict.fires) {
        refused.push_back({p.name, direction, std::move(verdict), /*kinds_match=*/true});
        continue;
      }
      steps.push_back({i, i + n, p.make(window)});
      std::fill_n(taken.begin() + static_cast<std::ptrdiff_t>(i), n, p.name);
      fired = true;
    }
    if (!fired && refused.empty()) {
      refused.push_back(not_needed.empty()
                            ? Refusal{p.name, direction, NoWindow(p, ops), /*kinds_match=*/false}
                            : not_needed.front());
    }
    refusals.insert(refusals.end(), refused.begin(), refused.end());
  }
  return steps;
}

// Adds a step for every op that no step has, and sorts.
void Complete(std::vector<PlanStep>& steps, const Taken& taken) {
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (taken[i].empty()) steps.push_back({i, i + 1, nullptr});
  }
  std::sort(steps.begin(), steps.end(),
            [](const PlanStep& a, const PlanStep& b) { return a.begin < b.begin; });
}

std::string StepText(const PlanStep& step, Window ops, const PlanKey& key) {
  std::string inner;
  for (std::size_t i = step.begin; i < step.end; ++i) {
    inner += fmt::format("{}{} {}", inner.empty() ? "" : " → ", ops[i]->kind(), ops[i]->name());
  }
  const quant::Recipe& recipe = key.recipes[step.end - 1];
  if (quant::Quantizes(recipe)) inner += fmt::format("; recipe {}", quant::Name(recipe));
  return step.fused ? fmt::format("{} = {}", step.fused->name(), inner) : inner;
}

// The steps of one direction: the joint ones, those of its list, and the ops by themselves.
std::vector<PlanStep> Direction(std::span<const Pattern> patterns, const char* direction,
                                Window ops, const PlanKey& key, std::vector<PlanStep> joint,
                                std::vector<Refusal>& refusals) {
  Taken taken(ops.size());
  for (const PlanStep& step : joint) {
    std::fill(taken.begin() + static_cast<std::ptrdiff_t>(step.begin),
              taken.begin() + static_cast<std::ptrdiff_t>(step.end), step.fused->name());
  }
  std::vector<PlanStep> steps = std::move(joint);
  const auto more = Apply(patterns, direction, ops, key, taken, refusals);
  steps.insert(steps.end(), more.begin(), more.end());
  Complete(steps, taken);
  return steps;
}

constexpr const char* kBackward = "backward";

}  // namespace

Plan MakePlan(Window ops, const PlanKey& key) {
  CISTRON_INVARIANT(key.recipes.size() == ops.size(), "fuse: {} recipes for {} ops",
                    key.recipes.size(), ops.size());
  Plan plan{key, {}, {}, {}};
  Taken taken(ops.size());
  std::vector<PlanStep> joint = Apply(JointPatterns(), "joint", ops, key, taken, plan.refusals);
  for (PlanStep& step : joint) step.joint = true;
  plan.forward = Direction(ForwardPatterns(), "forward", ops, key, joint, plan.refusals);
  plan.backward = Direction(BackwardPatterns(), kBackward, ops, key, joint, plan.refusals);
  CheckExpands(plan, ops.size());
  return plan;
}

Plan WithInputGradient(const Plan& plan, Window ops, bool input_gradient) {
  Plan other = plan;
  other.key.input_gradient = input_gradient;
  std::erase_if(other.refusals, [](const Refusal& r) { return r.direction == kBackward; });
  std::vector<PlanStep> joint = plan.backward;
  std::erase_if(joint, [](const PlanStep& step) { return !step.joint; });
  other.backward =
      Direction(BackwardPatterns(), kBackward, ops, other.key, std::move(joint), other.refusals);
  CheckExpands(other, ops.size());
  return other;
}

void CheckExpands(const Plan& plan, std::size_t num_ops) {
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    std::size_t at = 0;
    for (const PlanStep& step : *steps) {
      CISTRON_INVARIANT(
          step.begin == at && step.end > step.begin && (step.fused || step.end == step.begin + 1),
          "fuse: a step covers ops {} to {} where op {} is next", step.begin, step.end, at);
      at = step.end;
      if (!step.joint) continue;
      const auto& other = steps == &plan.forward ? plan.backward : plan.forward;
      const bool there = std::any_of(other.begin(), other.end(), [&](const PlanStep& s) {
        return s.begin == step.begin && s.end == step.end && s.fused == step.fused;
      });
      CISTRON_INVARIANT(there, "fuse: joint step {} to {} stands in one direction only", step.begin,
                        step.end);
    }
    CISTRON_INVARIANT(at == num_ops, "fuse: the plan covers {} of {} ops", at, num_ops);
  }
}

std::vector<std::string> DescribeRefusals(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Refusal& r : plan.refusals) {
    if (!r.kinds_match) continue;
    lines.push_back(fmt::format("{} ({}) does not fire: {}: {}; remedy: {}", r.pattern, r.direction,
                                r.verdict.op, r.verdict.reason, r.verdict.remedy));
  }
  return lines;
}

std::string Describe(const Plan& plan, Window ops) {
  std::string text;
  const auto add = [&](const PlanStep& step) {
    text += "  " + StepText(step, ops, plan.key) + "\n";
  };
  text += "forward:\n";
  std::for_each(plan.forward.begin(), plan.forward.end(), add);
  if (plan.key.training) {
    text += "backward, as it runs:\n";
    std::for_each(plan.backward.rbegin(), plan.backward.rend(), add);
  }
  if (plan.refusals.empty()) return text;
  text += "did not fire:\n";
  for (const Refusal& r : plan.refusals) {
    if (!r.needed) {
      text += fmt::format("  {} ({}): not needed: {}\n", r.pattern, r.direction, r.verdict.reason);
      continue;
    }
    text += fmt::format("  {} ({}): {}: {}; remedy: {}\n", r.pattern, r.direction, r.verdict.op,
                        r.verdict.reason, r.verdict.remedy);
  }
  return text;
}

}  // namespace cistron::nn::fuse
