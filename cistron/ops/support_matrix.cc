#include "cistron/ops/support_matrix.h"

#include <algorithm>
#include <map>
#include <set>

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

// The sizes of a small model.
constexpr std::int64_t kTokens = 4096, kHidden = 192, kFfn = 384, kVocab = 256;
constexpr std::int64_t kExperts = 8, kTopK = 2, kHeads = 6, kHeadDim = 32;
constexpr std::int64_t kRows = kTokens * kTopK;
constexpr const char* kBoth = "forward, backward";
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};
constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};
constexpr Scaling kScalings[] = {Scaling::kTensor, Scaling::kBlock1x128, Scaling::kBlock128x128,
                                 Scaling::kMxfp8, Scaling::kMxfp8Block32x32};

std::string DeviceName(DeviceType type) {
  return type == DeviceType::kCpu ? "cpu" : "cuda";
}

// Appends the answers of an op's implementations; make(dtype) is the problem.
template <class Problem, class Run, class F>
void Ask(std::string_view op, std::string_view direction,
         std::span<const Implementation<Problem, Run>> list, F&& make,
         std::vector<SupportRow>& rows) {
  for (const auto& implementation : list) {
    for (const DType dtype : kDTypes) {
      rows.push_back({std::string(op),
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
                std::span<const Implementation<Problem, Run>> list, F&& make,
                std::vector<SupportRow>& rows) {
  for (const auto& implementation : list) {
    for (const DType format : kFormats) {
      for (const Scaling scaling : kScalings) {
        rows.push_back({std::string(op), std::string(implementation.name),
                        std::string(Name(format)), implementation.supports(make(scaling, format)),
                        std::string(direction), std::string(Name(scaling)),
                        DeviceName(implementation.device)});
      }
    }
  }
}

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

// The first of an op's rows that runs on the context's device, or why none does.
class Choice {
 public:
  void Add(const Context& ctx, const SupportRow& row) {
    const std::string preferred = ctx.PreferredImpl(row.op.substr(0, row.op.find(' ')));
    if (row.device != DeviceName(ctx.device().type) || !chosen_.empty()) return;
    if (!preferred.empty() && row.impl != preferred) return;
    if (row.support) {
      chosen_ = row.impl;
    } else {
      reasons_ +=
          fmt::format("{}{}: {}", reasons_.empty() ? "" : "; ", row.impl, row.support.reason);
    }
  }
  bool runs() const { return !chosen_.empty(); }
  std::string Text() const {
    return runs() ? chosen_ : "none" + (reasons_.empty() ? "" : " (" + reasons_ + ")");
  }

 private:
  std::string chosen_, reasons_;
};

// A line an op, or one for each of its directions where they differ.
std::string ChosenLines(const std::string& op,
                        const std::vector<std::pair<std::string, std::string>>& directions) {
  const bool one = std::all_of(directions.begin(), directions.end(),
                               [&](const auto& d) { return d.second == directions[0].second; });
  std::string text;
  for (const auto& [direction, impl] : directions) {
    text += fmt::format("  {:<36} {}\n", one ? op : op + ", " + direction, impl);
    if (one) break;
  }
  return text;
}

}  // namespace

std::string FormatChosen(const Context& ctx, DType dtype,
                         std::span<const QuantizedLayout> layouts) {
  // By op, then direction, in the order of the matrices.
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> ops;
  const auto put = [&ops](const SupportRow& row, const std::string& text) {
    if (ops.empty() || ops.back().first != row.op) ops.push_back({row.op, {}});
    ops.back().second.emplace_back(row.direction, text);
  };
  const auto ask = [&](const std::vector<SupportRow>& rows, auto&& counts) {
    for (std::size_t i = 0; i < rows.size();) {
      Choice choice;
      const SupportRow& first = rows[i];
      for (; i < rows.size() && rows[i].op == first.op && rows[i].direction == first.direction;
           ++i) {
        if (counts(rows[i])) choice.Add(ctx, rows[i]);
      }
      put(first, choice.Text());
    }
  };
  const std::vector<SupportRow> matrix = SupportMatrix();
  ask(matrix, [&](const SupportRow& row) {
    // Masters and their update are in the compute type.
    return row.dtype == Name(row.op == "adamw" ? ComputeType(dtype) : dtype);
  });
  if (!layouts.empty()) {
    ask(FormatSupport(), [&](const SupportRow& row) {
      return std::any_of(layouts.begin(), layouts.end(), [&](const QuantizedLayout& layout) {
        return row.dtype == Name(layout.format) && row.scaling == Name(layout.scaling);
      });
    });
  }
  std::string text;
  for (const auto& [op, directions] : ops) text += ChosenLines(op, directions);
  return text;
}

std::vector<SupportRow> SupportMatrix() {
  std::vector<SupportRow> rows;
  struct Transposes {
    const char* direction;
    Transpose a, b;
  };
  for (const Transposes& p : {Transposes{"forward", Transpose::kNo, Transpose::kYes},
                              {"dgrad", Transpose::kNo, Transpose::kNo},
                              {"wgrad", Transpose::kYes, Transpose::kNo}}) {
    Ask(
        "gemm", p.direction, GemmImpls(),
        [&](DType t) { return GemmProblem{t, t, p.a, p.b, kTokens, kHidden, kHidden}; }, rows);
  }
  for (const auto& [kind, direction] : {std::pair{GroupedGemmKind::kForward, "forward"},
                                        {GroupedGemmKind::kDgrad, "dgrad"},
                                        {GroupedGemmKind::kWgrad, "wgrad"}}) {
    Ask(
        "grouped_gemm", direction, GroupedGemmImpls(),
        [&, &k = kind](DType t) {
          const DType out = k == GroupedGemmKind::kWgrad ? ComputeType(t) : t;
          return GroupedGemmProblem{k, t, out, kExperts, kRows, 2 * kFfn, kHidden};
        },
        rows);
  }
  Ask(
      "grouped_mlp", kBoth, GroupedMlpImpls(),
      [](DType t) { return GroupedMlpProblem{t, kExperts, kRows, kHidden, kFfn, kHidden}; }, rows);
  Ask(
      "grouped_bias", kBoth, GroupedBiasImpls(),
      [](DType t) {
        return GroupedBiasProblem{t, kExperts, kRows, kHidden};
      },
      rows);
  Ask(
      "activation", kBoth, SwiGluImpls(),
      [](DType t) {
        return SwiGluProblem{t, kRows, kFfn};
      },
      rows);
  for (const ActivationKind kind : kActivationKinds) {
    Ask(
        fmt::format("activation {}", Name(kind)), kBoth, ScaledActivationImpls(),
        [&](DType t) {
          return ScaledActivationProblem{t, {.kind = kind}, kRows, kFfn};
        },
        rows);
  }
  Ask(
      "norm", kBoth, RmsNormImpls(),
      [](DType t) {
        return RmsNormProblem{t, kTokens, kHidden};
      },
      rows);
  Ask(
      "rope", kBoth, RopeImpls(),
      [](DType t) {
        return RopeProblem{t, kTokens, kHeads, kHeadDim};
      },
      rows);
  Ask(
      "attention", kBoth, AttentionImpls(),
      [](DType t) {
        AttentionConfig config;
        config.num_heads = kHeads;
        config.num_kv_heads = kHeads;
        config.head_dim = kHeadDim;
        return AttentionProblem{t, config, kTokens};
      },
      rows);
  Ask(
      "embedding", kBoth, EmbeddingImpls(),
      [](DType t) {
        return EmbeddingProblem{t, kTokens, kVocab, kHidden};
      },
      rows);
  Ask(
      "cross_entropy", kBoth, CrossEntropyImpls(),
      [](DType t) {
        return CrossEntropyProblem{t, kTokens, kHidden, kVocab};
      },
      rows);
  Ask(
      "router", kBoth, RouterImpls(),
      [](DType t) {
        return RouterProblem{t, {.num_experts = kExperts, .top_k = kTopK}, kTokens};
      },
      rows);
  Ask(
      "balance_loss", kBoth, BalanceLossImpls(),
      [](DType t) {
        return BalanceLossProblem{t, kExperts};
      },
      rows);
  Ask(
      "jitter", kBoth, JitterImpls(),
      [](DType t) {
        return JitterProblem{t, kTokens, kHidden};
      },
      rows);
  Ask(
      "permute", kBoth, PermuteImpls(),
      [](DType t) {
        return PermuteProblem{t, kTokens, kTopK, kHidden};
      },
      rows);
  Ask(
      "adamw", "update", AdamWImpls(),
      [](DType t) {
        return AdamWProblem{t, kHidden * kHidden, false};
      },
      rows);
  Ask(
      "reduce", "sum", ReduceImpls(),
      [](DType t) {
        return ReduceProblem{t, kHidden * kHidden};
      },
      rows);
  return rows;
}

std::vector<SupportRow> FormatSupport() {
  std::vector<SupportRow> rows;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    AskFormats(
        fmt::format("quantize {}", Name(dtype)), "row-wise, column-wise", QuantizeImpls(),
        [dtype](Scaling scaling, DType format) {
          return QuantizeProblem{scaling, format, dtype};
        },
        rows);
  }
  for (const auto& [kind, direction] : {std::pair{QuantizedGemmKind::kForward, "forward"},
                                        {QuantizedGemmKind::kDgrad, "dgrad"},
                                        {QuantizedGemmKind::kWgrad, "wgrad"}}) {
    AskFormats(
        "quantized_gemm", direction, QuantizedGemmImpls(),
        [&k = kind](Scaling scaling, DType format) {
          // Gradients have the format, what they are multiplied with is e4m3.
          const bool forward = k == QuantizedGemmKind::kForward;
          return QuantizedGemmProblem{
              k,           scaling,  scaling, format,   forward ? format : DType::kE4M3,
              DType::kF32, kExperts, kRows,   2 * kFfn, kHidden};
        },
        rows);
  }
  return rows;
}

void CheckImplChoice(std::string_view choice) {
  // What stands in the tables, "quantize bf16" for one problem of quantize.
  std::map<std::string, std::set<std::string>> ops;
  std::set<std::string> all;
  for (const auto& rows : {SupportMatrix(), FormatSupport()}) {
    for (const SupportRow& row : rows) {
      ops[row.op.substr(0, row.op.find(' '))].insert(row.impl);
      all.insert(row.impl);
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
    const std::set<std::string>* known = &all;
    if (equals != std::string::npos) {
      const std::string op = entry.substr(0, equals);
      const auto it = ops.find(op);
      if (it == ops.end()) {
        std::set<std::string> names;
        for (const auto& [name, impls] : ops) names.insert(name);
        CISTRON_THROW(kBadInput,
                      "CISTRON_IMPL: {}: there is no op '{}'; the nearest is '{}' (`cistron info "
                      "--ops` lists all)",
                      Printable(entry), Printable(op), nearest(op, names));
      }
      known = &it->second;
    }
    const std::string impl = equals == std::string::npos ? entry : entry.substr(equals + 1);
    if (known->contains(impl)) continue;
    CISTRON_THROW(kBadInput,
                  "CISTRON_IMPL: {}: there is no implementation '{}'{}; the nearest is '{}' "
                  "(`cistron info --ops` lists all)",
                  Printable(entry), Printable(impl),
                  equals == std::string::npos
                      ? std::string()
                      : fmt::format(" of {}", Printable(entry.substr(0, equals))),
                  nearest(impl, *known));
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
