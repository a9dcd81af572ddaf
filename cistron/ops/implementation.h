// One visible, ordered list of implementations per op: best first, the scalar reference last.
//
// Each implementation answers for a problem with yes or with a reason; the first that says yes
// runs. A user may ask for one by name (Context::PreferredImpl); if that one cannot run the
// problem, it is an error that carries its reason, never a silent fallback. Under
// Context::strict() it is also an error when the best implementation refuses and the user asked for
// no other.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/ops/context.h"

namespace cistron::ops {

// Answer of an implementation to a problem. Questions return; they do not throw.
struct Support {
  bool ok = true;
  std::string reason;  // why not; empty when ok

  static Support Yes() { return {}; }
  static Support No(std::string why) { return {false, std::move(why)}; }
  explicit operator bool() const { return ok; }
};

// One entry of an op's list. `Problem` describes dtypes, shapes and options of a call; `Run` is a
// struct of function pointers (forward, backward, …) with one signature for all implementations.
template <class Problem, class Run>
struct Implementation {
  std::string_view name;  // "cpu", "ref", "cuda"
  Support (*supports)(const Problem&);
  Run run;
  DeviceType device = DeviceType::kCpu;  // whose tensors it takes
};

// The implementation that runs a problem: the user's choice, else the first of the context's device
// that supports it.
template <class Problem, class Run>
const Run& Select(const Context& ctx, std::string_view op,
                  std::span<const Implementation<Problem, Run>> list, const Problem& problem) {
  const std::string preferred = ctx.PreferredImpl(op);
  std::string reasons;
  for (const auto& impl : list) {
    if (impl.device != ctx.device().type) continue;
    if (!preferred.empty() && impl.name != preferred) continue;
    const Support support = impl.supports(problem);
    if (support) {
      if (ctx.strict() && preferred.empty() && !reasons.empty()) {
        CISTRON_THROW(kUnsupported,
                      "{0}: strict: '{1}' would run this problem, because what is better refuses "
                      "it:{2}\nchange what it refuses, ask for '{1}' by CISTRON_IMPL={0}={1}, or "
                      "set strict=false",
                      op, impl.name, reasons);
      }
      if (ctx.recorder() != nullptr) ctx.recorder()->Begin(op, impl.name);
      return impl.run;
    }
    reasons += fmt::format("\n  {}: {}", impl.name, support.reason);
  }
  if (reasons.empty()) {
    reasons = preferred.empty()
                  ? std::string("\n  there is none for this device")
                  : fmt::format("\n  there is no implementation named '{}'", preferred);
  }
  CISTRON_THROW(kUnsupported, "{}: no implementation runs this problem on {}:{}", op,
                ToString(ctx.device()), reasons);
}

// One row of the support matrix that `cistron info --ops` prints.
struct SupportRow {
  std::string op;
  std::string impl;
  std::string dtype;  // or 8-bit format
  Support support;
  std::string direction = {};  // "forward, backward", "dgrad", …
  std::string scaling = {};    // of 8-bit formats
  std::string device = "cpu";
};

}  // namespace cistron::ops
