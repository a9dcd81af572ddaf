#include "cistron/ops/support_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/activation/scaled_activation.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/ops/balance_loss/balance_loss.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/ops/embedding/embedding.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_bias/grouped_bias.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/grouped_mlp/grouped_mlp.h"
#include "cistron/ops/jitter/jitter.h"
#include "cistron/ops/norm/norm.h"
#include "cistron/ops/optimizer/adamw.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantized_gemm/quantized_gemm.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/ops/rope/rope.h"
#include "cistron/ops/router/router.h"

namespace cistron::ops {
namespace {

constexpr const char* kBoth = "forward, backward";
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};
constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};
constexpr Scaling kScalings[] = {Scaling::kTensor, Scaling::kBlock1x128, Scaling::kBlock128x128,
                                 Scaling::kMxfp8, Scaling::kMxfp8Block32x32};

std::string DeviceName(DeviceType type) {
  return type == DeviceType::kCpu ? "cpu" : "cuda";
}

// Asks implementations, of one device or all, and keeps their answers.
class Survey {
 public:
  explicit Survey(std::optional<DeviceType> device) : device_(device) {}

  // Every implementation of an op in every dtype; make(dtype) is the problem.
  template <class Problem, class Run, class F>
  void Ask(std::string_view op, std::string_view direction,
           std::span<const Implementation<Problem, Run>> list, F&& make) {
    for (const auto& implementation : list) {
      if (device_ && implementation.device != *device_) continue;
      for (const DType dtype : kDTypes) {
        rows_.push_back({std::string(op),
                         std::string(implementation.name),
                         std::string(Name(dtype)),
                         implementation.supports(make(dtype)),
                         std::string(direction),
                         {},
                         DeviceName(implementation.device)});
      }
    }
  }

  // The same for ops on 8-bit formats; make(scaling, format) is the problem.
  template <class Problem, class Run, class F>
  void AskFormats(std::string_view op, std::string_view direction,
                  std::span<const Implementation<Problem, Run>> list, F&& make) {
    for (const auto& implementation : list) {
      if (device_ && implementation.device != *device_) continue;
      for (const DType format : kFormats) {
        for (const Scaling scaling : kScalings) {
          rows_.push_back({std::string(op), std::string(implementation.name),
                           std::string(Name(format)),
                           implementation.supports(make(scaling, format)), std::string(direction),
                           std::string(Name(scaling)), DeviceName(implementation.device)});
        }
      }
    }
  }

  std::vector<SupportRow> Take() { return std::move(rows_); }

 private:
  std::optional<DeviceType> device_;
  std::vector<SupportRow> rows_;
};

// One table: a line for each run of rows with the same `line`, which it begins with.
template <class F>
std::string Table(const std::string& head, std::size_t columns, std::span<const SupportRow> rows,
                  F&& line) {
  std::string text = head + "\n|";
  const auto cells = static_cast<std::size_t>(std::count(head.begin(), head.end(), '|')) - 1;
  for (std::size_t i = 0; i < cells; ++i) text += "---|";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % columns == 0) text += "\n" + line(rows[i]);
    text +=
        rows[i].support ? std::string(" yes |") : fmt::format(" no: {} |", rows[i].support.reason);
  }
  return text + "\n";
}

// "quantize bf16" is a problem of quantize.
std::string OpOf(const SupportRow& row) {
  return row.op.substr(0, row.op.find(' '));
}

// Implementations of one op and direction, in their order, each with its first refusal.
std::vector<std::pair<std::string, Support>> Answers(std::span<const SupportRow> rows) {
  std::vector<std::pair<std::string, Support>> answers;
  for (const SupportRow& row : rows) {
    if (answers.empty() || answers.back().first != row.impl) answers.push_back({row.impl, {}});
    if (answers.back().second) answers.back().second = row.support;
  }
  return answers;
}

OpChoice ChoiceOf(const Context& ctx, std::span<const SupportRow> rows) {
  OpChoice choice{rows.front().op, rows.front().direction, ctx.PreferredImpl(OpOf(rows.front()))};
  for (const auto& [impl, support] : Answers(rows)) {
    choice.names.push_back(impl);
    if (!choice.impl.empty() || (!choice.preferred.empty() && impl != choice.preferred)) continue;
    if (support) {
      choice.impl = impl;
    } else {
      choice.refusals.push_back(fmt::format("{}: {}", impl, support.reason));
    }
  }
  return choice;
}

// Why no implementation of an op runs, and what to change.
std::string NoneRuns(const OpChoice& c, std::string_view device) {
  const std::string names = fmt::format("{}", fmt::join(c.names, ", "));
  if (c.preferred.empty()) {
    return fmt::format("{} ({}): no implementation runs it on {}: {}", c.op, c.direction, device,
                       fmt::join(c.refusals, "; "));
  }
  const std::string why = c.refusals.empty() ? "there is none of that name" : c.refusals.front();
  return fmt::format(
      "CISTRON_IMPL asks for '{0}' of {1} ({2}), which does not run: {3}; on {4} there are {5}: "
      "name "
      "one of these as {1}=NAME in CISTRON_IMPL, or leave the choice out",
      c.preferred, c.op.substr(0, c.op.find(' ')), c.direction, why, device, names);
}

}  // namespace

std::vector<OpChoice> ChooseImplementations(const Context& ctx, const Workload& workload) {
  std::vector<OpChoice> choices;
  const auto choose = [&](std::vector<SupportRow> rows, auto&& counts) {
    std::erase_if(rows, [&](const SupportRow& row) {
      const auto& unused = workload.unused;
      return !counts(row) || std::find(unused.begin(), unused.end(), row.op) != unused.end();
    });
    for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
      while (end < rows.size() && rows[end].op == rows[begin].op &&
             rows[end].direction == rows[begin].direction) {
        ++end;
      }
      choices.push_back(ChoiceOf(ctx, std::span(rows).subspan(begin, end - begin)));
    }
  };
  const DeviceType device = ctx.device().type;
  choose(SupportMatrix(workload.sizes, device), [&](const SupportRow& row) {
    return row.dtype == Name(row.op == "adamw" ? workload.optimizer_dtype : workload.dtype);
  });
  if (workload.layouts.empty()) return choices;
  choose(FormatSupport(workload.sizes, device), [&](const SupportRow& row) {
    return std::any_of(
        workload.layouts.begin(), workload.layouts.end(), [&](const QuantizedLayout& layout) {
          return row.dtype == Name(layout.format) && row.scaling == Name(layout.scaling);
        });
  });
  return choices;
}

void CheckThatAllRun(const Context& ctx, std::span<const OpChoice> choices) {
  std::vector<std::string> lines;
  for (const OpChoice& c : choices) {
    if (c.impl.empty()) lines.push_back(NoneRuns(c, DeviceName(ctx.device().type)));
  }
  if (!lines.empty()) CISTRON_THROW(kUnsupported, "{}", fmt::join(lines, "\n"));
}

std::vector<std::string> StrictRefusals(std::span<const OpChoice> choices) {
  std::vector<std::string> lines;
  for (const OpChoice& c : choices) {
    if (!c.preferred.empty() || c.refusals.empty()) continue;
    lines.push_back(
        fmt::format("{} ({}): '{}' would run, because what is better refuses it: {}; remedy: "
                    "change what it refuses, or ask for '{}' by CISTRON_IMPL={}={}",
                    c.op, c.direction, c.impl, fmt::join(c.refusals, "; "), c.impl,
                    c.op.substr(0, c.op.find(' ')), c.impl));
  }
  return lines;
}

// A line an op, or one for each of its directions where they differ.
std::string FormatChosen(std::span<const OpChoice> choices) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < choices.size(); begin = end) {
    bool one = true;
    for (; end < choices.size() && choices[end].op == choices[begin].op; ++end) {
      one = one && choices[end].impl == choices[begin].impl;
    }
    for (const OpChoice& c : choices.subspan(begin, one ? 1 : end - begin)) {
      text += fmt::format("  {:<36} {}\n", one ? c.op : c.op + ", " + c.direction, c.impl);
    }
  }
  return text;
}

std::vector<SupportRow> SupportMatrix(const OpSizes& s, std::optional<DeviceType> device) {
  Survey survey(device);
  const std::int64_t rows = s.tokens * s.top_k;
  struct Transposes {
    const char* direction;
    Transpose a, b;
  };
  for (const Transposes& p : {Transposes{"forward", Transpose::kNo, Transpose::kYes},
                              {"dgrad", Transpose::kNo, Transpose::kNo},
                              {"wgrad", Transpose::kYes, Transpose::kNo}}) {
    survey.Ask("gemm", p.direction, GemmImpls(), [&](DType t) {
      return GemmProblem{t, t, p.a, p.b, s.tokens, s.heads * s.head_dim, s.hidden};
    });
  }
  for (const auto& [kind, direction] : {std::pair{GroupedGemmKind::kForward, "forward"},
                                        {GroupedGemmKind::kDgrad, "dgrad"},
                                        {GroupedGemmKind::kWgrad, "wgrad"}}) {
    survey.Ask("grouped_gemm", direction, GroupedGemmImpls(), [&, &k = kind](DType t) {
      const DType out = k == GroupedGemmKind::kWgrad ? ComputeType(t) : t;
      return GroupedGemmProblem{k, t, out, s.experts, rows, 2 * s.ffn, s.hidden};
    });
  }
  survey.Ask("grouped_mlp", kBoth, GroupedMlpImpls(), [&](DType t) {
    return GroupedMlpProblem{t, s.experts, rows, s.hidden, s.ffn, s.hidden};
  });
  survey.Ask("grouped_bias", kBoth, GroupedBiasImpls(), [&](DType t) {
    return GroupedBiasProblem{t, s.experts, rows, s.hidden};
  });
  survey.Ask("activation", kBoth, SwiGluImpls(), [&](DType t) {
    return SwiGluProblem{t, rows, s.ffn};
  });
  for (const ActivationKind kind : kActivationKinds) {
    survey.Ask(fmt::format("activation {}", Name(kind)), kBoth, ScaledActivationImpls(),
               [&](DType t) {
                 return ScaledActivationProblem{t, {.kind = kind}, rows, s.ffn};
               });
  }
  survey.Ask("norm", kBoth, RmsNormImpls(), [&](DType t) {
    return RmsNormProblem{t, s.tokens, s.hidden};
  });
  survey.Ask("rope", kBoth, RopeImpls(), [&](DType t) {
    return RopeProblem{t, s.tokens, s.heads, s.head_dim};
  });
  const auto attention = [&](DType t) {
    return AttentionProblem{t,
                            {s.heads, s.kv_heads, s.head_dim, s.window},
                            s.tokens,
                            s.num_sequences,
                            s.max_length,
                            s.uniform};
  };
  // In the order of bf16, the one dtype of those whose order depends on the sizes.
  survey.Ask("attention", kBoth, AttentionImplsFor(attention(DType::kBF16)), attention);
  survey.Ask("embedding", kBoth, EmbeddingImpls(), [&](DType t) {
    return EmbeddingProblem{t, s.tokens, s.vocab, s.hidden};
  });
  survey.Ask("cross_entropy", kBoth, CrossEntropyImpls(), [&](DType t) {
    return CrossEntropyProblem{t, s.tokens, s.hidden, s.vocab};
  });
  survey.Ask("router", kBoth, RouterImpls(), [&](DType t) {
    return RouterProblem{t, {.num_experts = s.experts, .top_k = s.top_k}, s.tokens};
  });
  survey.Ask("balance_loss", kBoth, BalanceLossImpls(), [&](DType t) {
    return BalanceLossProblem{t, s.experts};
  });
  survey.Ask("jitter", kBoth, JitterImpls(), [&](DType t) {
    return JitterProblem{t, s.tokens, s.hidden};
  });
  survey.Ask("permute", kBoth, PermuteImpls(), [&](DType t) {
    return PermuteProblem{t, s.tokens, s.top_k, s.hidden};
  });
  survey.Ask("adamw", "update", AdamWImpls(), [&](DType t) {
    return AdamWProblem{t, s.hidden * s.hidden, false};
  });
  survey.Ask("reduce", "sum", ReduceImpls(), [&](DType t) {
    return ReduceProblem{t, s.hidden * s.hidden};
  });
  return survey.Take();
}

std::vector<SupportRow> FormatSupport(const OpSizes& s, std::optional<DeviceType> device) {
  Survey survey(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    survey.AskFormats(fmt::format("quantize {}", Name(dtype)), "row-wise, column-wise",
                      QuantizeImpls(), [dtype](Scaling scaling, DType format) {
                        return QuantizeProblem{scaling, format, dtype};
                      });
  }
  for (const auto& [kind, direction] : {std::pair{QuantizedGemmKind::kForward, "forward"},
                                        {QuantizedGemmKind::kDgrad, "dgrad"},
                                        {QuantizedGemmKind::kWgrad, "wgrad"}}) {
    survey.AskFormats("quantized_gemm", direction, QuantizedGemmImpls(),
                      [&, &k = kind](Scaling scaling, DType format) {
                        // Gradients have the format, what they are multiplied with is e4m3.
                        const bool forward = k == QuantizedGemmKind::kForward;
                        return QuantizedGemmProblem{k,
                                                    scaling,
                                                    scaling,
                                                    format,
                                                    forward ? format : DType::kE4M3,
                                                    DType::kF32,
                                                    s.experts,
                                                    s.tokens * s.top_k,
                                                    2 * s.ffn,
                                                    s.hidden};
                      });
  }
  return survey.Take();
}

void CheckImplChoice(std::string_view choice, std::optional<DeviceType> device) {
  if (choice.empty()) return;
  // By op, then device; the empty op stands for all.
  std::map<std::string, std::map<std::string, std::set<std::string>>> ops;
  for (const auto& rows : {SupportMatrix(), FormatSupport()}) {
    for (const SupportRow& row : rows) {
      ops[OpOf(row)][row.device].insert(row.impl);
      ops[""][row.device].insert(row.impl);
    }
  }
  const auto nearest = [](const std::string& name, const auto& names) {
    return *std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
      return EditDistance(name, a) < EditDistance(name, b);
    });
  };
  while (!choice.empty()) {
    const std::size_t comma = std::min(choice.find(','), choice.size());
    const std::string entry(choice.substr(0, comma));
    choice.remove_prefix(std::min(comma + 1, choice.size()));
    if (entry.empty()) continue;
    const std::size_t equals = entry.find('=');
    const bool general = equals == std::string::npos;
    const std::string op = general ? "" : entry.substr(0, equals);
    const std::string impl = general ? entry : entry.substr(equals + 1);
    const auto known = ops.find(op);
    if (known == ops.end() || (!general && op.empty())) {
      std::set<std::string> names;
      for (const auto& [name, devices] : ops) {
        if (!name.empty()) names.insert(name);
      }
      CISTRON_THROW(kBadInput,
                    "CISTRON_IMPL: {}: there is no op '{}'; the nearest is '{}' (`cistron info "
                    "--ops` lists all)",
                    Printable(entry), Printable(op), nearest(op, names));
    }
    // Those to choose from, and on which device else the name is known.
    std::set<std::string> here;
    std::string elsewhere;
    for (const auto& [name, impls] : known->second) {
      if (!device || name == DeviceName(*device)) {
        here.insert(impls.begin(), impls.end());
      } else if (impls.contains(impl)) {
        elsewhere = name;
      }
    }
    if (here.contains(impl)) continue;
    const std::string of = general ? "" : " of " + op;
    const std::string there = device ? " on " + DeviceName(*device) : "";
    CISTRON_THROW(
        kBadInput,
        "CISTRON_IMPL: {}: there is no implementation '{}'{}{}; the nearest is '{}', there are {}: "
        "{}choose one of these, or leave the choice out (`cistron info --ops` lists all)",
        Printable(entry), Printable(impl), of, there, nearest(impl, here), fmt::join(here, ", "),
        elsewhere.empty() ? "" : fmt::format("'{}' needs device={}; ", impl, elsewhere));
  }
}

std::string FormatSupportMatrix() {
  std::string head = "| op | implementation | device | direction |";
  for (const DType dtype : kDTypes) head += fmt::format(" {} |", Name(dtype));
  std::string text = Table(head, std::size(kDTypes), SupportMatrix(), [](const SupportRow& row) {
    return fmt::format("| {} | {} | {} | {} |", row.op, row.impl, row.device, row.direction);
  });
  head = "| op | implementation | device | direction | format |";
  for (const Scaling scaling : kScalings) head += fmt::format(" {} |", Name(scaling));
  return text + "\n" +
         Table(head, std::size(kScalings), FormatSupport(), [](const SupportRow& row) {
           return fmt::format("| {} | {} | {} | {} | {} |", row.op, row.impl, row.device,
                              row.direction, row.dtype);
         });
}

}  // namespace cistron::ops
