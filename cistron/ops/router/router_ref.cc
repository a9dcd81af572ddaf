// Scalar reference of router: one token at a time.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistron/ops/router/router_impls.h"

namespace cistron::ops {
namespace {

Support SupportsRouter(const RouterProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

// Statistics row of each token; −1 for a token outside every sequence.
std::vector<std::int64_t> ScopeOfTokens(const PackedSequences& scopes, std::int64_t tokens) {
  std::vector<std::int64_t> scope(static_cast<std::size_t>(tokens), scopes.cu_seqlens ? -1 : 0);
  if (scopes.cu_seqlens) {
    const std::int64_t* cu = scopes.cu_seqlens.data<std::int64_t>();
    for (std::int64_t s = 0; s < scopes.num_sequences(); ++s) {
      std::fill(scope.begin() + cu[s], scope.begin() + cu[s + 1], s);
    }
  }
  return scope;
}

// What one token's logits give.
template <class C>
struct Token {
  std::vector<C> logits;
  std::vector<C> scores;        // sigmoid(l), or exp(l − max)
  std::vector<C> distribution;  // softmax over all experts, or s / Σ s
  C sum_of_scores = 0;
  C log_sum_exp = 0;

  template <class T>
  Token(const RouterConfig& config, const T* row) {
    const auto experts = static_cast<std::size_t>(config.num_experts);
    for (std::size_t e = 0; e < experts; ++e) logits.push_back(C(row[e]));
    const C largest = *std::max_element(logits.begin(), logits.end());
    C sum_of_exp = 0;
    std::vector<C> exponentials;
    for (const C l : logits) sum_of_exp += exponentials.emplace_back(std::exp(l - largest));
    log_sum_exp = largest + std::log(sum_of_exp);
    if (config.score == ScoreFunction::kSigmoid) {
      for (const C l : logits) scores.push_back(1 / (1 + std::exp(-l)));
    } else {
      scores = exponentials;
    }
    for (const C s : scores) sum_of_scores += s;
    for (const C s : scores) distribution.push_back(s / sum_of_scores);
  }
};

// The order of choice: larger keys first, NaN last, ties to the lower index.
template <class C>
struct Before {
  const std::vector<C>& keys;
  bool operator()(std::int32_t a, std::int32_t b) const {
    const C ka = keys[static_cast<std::size_t>(a)], kb = keys[static_cast<std::size_t>(b)];
    if (std::isnan(ka) != std::isnan(kb)) return std::isnan(kb);
    if (ka != kb && !std::isnan(ka)) return ka > kb;
    return a < b;
  }
};

template <class C>
std::vector<std::int32_t> TopOf(std::vector<std::int32_t> candidates, const std::vector<C>& keys,
                                std::int64_t count) {
  std::sort(candidates.begin(), candidates.end(), Before<C>{keys});
  candidates.resize(static_cast<std::size_t>(count));
  return candidates;
}

std::vector<std::int32_t> Range(std::int64_t begin, std::int64_t count) {
  std::vector<std::int32_t> range(static_cast<std::size_t>(count));
  std::iota(range.begin(), range.end(), static_cast<std::int32_t>(begin));
  return range;
}

template <class C>
std::vector<std::int32_t> Choose(const RouterConfig& config, const std::vector<C>& keys) {
  if (config.num_groups == 1) {
    return TopOf(Range(0, config.num_experts), keys, config.top_k);
  }
  const std::int64_t size = config.num_experts / config.num_groups;
  std::vector<C> group_keys;
  for (std::int64_t g = 0; g < config.num_groups; ++g) {
    C sum = 0;
    for (const std::int32_t e :
         TopOf(Range(g * size, size), keys, config.top_k / config.groups_kept)) {
      sum += keys[static_cast<std::size_t>(e)];
    }
    group_keys.push_back(sum);
  }
  std::vector<std::int32_t> candidates;
  for (const std::int32_t g : TopOf(Range(0, config.num_groups), group_keys, config.groups_kept)) {
    for (const std::int32_t e : Range(g * size, size)) candidates.push_back(e);
  }
  return TopOf(candidates, keys, config.top_k);
}

template <class C>
bool Normalizes(const RouterConfig& config) {
  return config.normalize && (config.score == ScoreFunction::kSoftmaxAfterTopK ||
                              (config.score == ScoreFunction::kSigmoid && config.top_k > 1));
}

// Value added to the sum of the chosen scores before dividing by it.
template <class C>
C NormalizerEpsilon(const RouterConfig& config) {
  return config.score == ScoreFunction::kSigmoid ? static_cast<C>(1e-20) : C(0);
}

// Probabilities of the chosen experts before routed_scaling.
template <class C>
std::vector<C> Probabilities(const RouterConfig& config, const Token<C>& token,
                             const std::int32_t* chosen) {
  const auto k = static_cast<std::size_t>(config.top_k);
  std::vector<C> p(k);
  if (config.score == ScoreFunction::kSigmoid) {
    for (std::size_t i = 0; i < k; ++i) p[i] = token.scores[static_cast<std::size_t>(chosen[i])];
  } else if (!Normalizes<C>(config)) {
    for (std::size_t i = 0; i < k; ++i) {
      p[i] = token.distribution[static_cast<std::size_t>(chosen[i])];
    }
    return p;
  } else {
    // Relative to the largest chosen logit, which is the first: its exponential is 1.
    const C largest = token.logits[static_cast<std::size_t>(chosen[0])];
    for (std::size_t i = 0; i < k; ++i) {
      p[i] = std::exp(token.logits[static_cast<std::size_t>(chosen[i])] - largest);
    }
  }
  if (Normalizes<C>(config)) {
    const C sum = std::accumulate(p.begin(), p.end(), C(0)) + NormalizerEpsilon<C>(config);
    for (C& value : p) value /= sum;
  }
  return p;
}

template <class T>
void Forward(const RouterConfig& config, const Tensor& logits, const Tensor& bias,
             const Tensor& token_mask, const PackedSequences& scopes, const RouterOutputs& out) {
  using C = Compute<T>;
  const std::int64_t tokens = logits.dim(0), experts = config.num_experts, k = config.top_k;
  for (const Tensor& t : {out.counts, out.score_sums, out.z_sums, out.nonfinite_tokens}) {
    if (t) FillZero(t);
  }
  const std::vector<std::int64_t> scope = ScopeOfTokens(scopes, tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int32_t* chosen = out.experts.data<std::int32_t>() + t * k;
    C* probs = out.probs.data<C>() + t * k;
    if (token_mask && token_mask.data<std::uint8_t>()[t] == 0) {
      std::fill(chosen, chosen + k, -1);
      std::fill(probs, probs + k, C(0));
      continue;
    }
    const Token<C> token(config, logits.data<T>() + t * experts);
    std::vector<C> keys = config.score == ScoreFunction::kSigmoid ? token.scores : token.logits;
    if (bias) {
      for (std::int64_t e = 0; e < experts; ++e) {
        keys[static_cast<std::size_t>(e)] += bias.data<C>()[e];
      }
    }
    const std::vector<std::int32_t> choice =
        config.given_experts ? std::vector<std::int32_t>(chosen, chosen + k) : Choose(config, keys);
    std::copy(choice.begin(), choice.end(), chosen);
    const std::vector<C> p = Probabilities(config, token, chosen);
    for (std::int64_t i = 0; i < k; ++i) {
      probs[i] = p[static_cast<std::size_t>(i)] * static_cast<C>(config.routed_scaling);
    }
    const bool finite =
        std::all_of(token.logits.begin(), token.logits.end(), [](C l) { return std::isfinite(l); });
    if (out.nonfinite_tokens && !finite) ++*out.nonfinite_tokens.data<std::int64_t>();
    const std::int64_t row = scope[static_cast<std::size_t>(t)];
    if (row < 0) continue;
    if (out.counts) {
      for (const std::int32_t e : choice) ++out.counts.data<std::int64_t>()[row * experts + e];
    }
    if (out.score_sums) {
      for (std::int64_t e = 0; e < experts; ++e) {
        out.score_sums.data<double>()[row * experts + e] +=
            token.distribution[static_cast<std::size_t>(e)];
      }
    }
    if (out.z_sums) {
      const double z = token.log_sum_exp;
      out.z_sums.data<double>()[row] += z * z;
    }
  }
}

// d(scores) → d(logits) of Σ dprobs·probs, added to `grad`.
template <class C>
void AddProbabilityGradient(const RouterConfig& config, const Token<C>& token,
                            const std::int32_t* chosen, const C* dprobs, std::vector<C>& grad) {
  const auto k = static_cast<std::size_t>(config.top_k);
  const C scaling = static_cast<C>(config.routed_scaling);
  const std::vector<C> p = Probabilities(config, token, chosen);
  C inner = 0;
  for (std::size_t i = 0; i < k; ++i) inner += dprobs[i] * scaling * p[i];
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  if (!sigmoid && !Normalizes<C>(config)) {
    // Every expert shares the denominator.
    for (std::size_t e = 0; e < grad.size(); ++e) grad[e] -= inner * token.distribution[e];
  }
  C sum = NormalizerEpsilon<C>(config);
  for (std::size_t i = 0; i < k; ++i) sum += token.scores[static_cast<std::size_t>(chosen[i])];
  for (std::size_t i = 0; i < k; ++i) {
    const auto e = static_cast<std::size_t>(chosen[i]);
    const C upstream = dprobs[i] * scaling;
    if (sigmoid) {
      const C s = token.scores[e];
      const C ds = Normalizes<C>(config) ? (upstream - inner) / sum : upstream;
      grad[e] += ds * s * (1 - s);
    } else {
      grad[e] += p[i] * (Normalizes<C>(config) ? upstream - inner : upstream);
    }
  }
}

// Gradient of Σ_e aux[e]·distribution[e], added to `grad`.
template <class C>
void AddAuxiliaryGradient(const RouterConfig& config, const Token<C>& token, const double* aux,
                          std::vector<C>& grad) {
  C inner = 0;
  for (std::size_t e = 0; e < grad.size(); ++e) {
    inner += static_cast<C>(aux[e]) * token.distribution[e];
  }
  for (std::size_t e = 0; e < grad.size(); ++e) {
    const C difference = static_cast<C>(aux[e]) - inner;
    if (config.score == ScoreFunction::kSigmoid) {
      const C s = token.scores[e];
      grad[e] += difference / token.sum_of_scores * s * (1 - s);
    } else {
      grad[e] += difference * token.distribution[e];
    }
  }
}

template <class T>
void Backward(const RouterConfig& config, const Tensor& dprobs, const Tensor& logits,
              const Tensor& experts, const Tensor& token_mask, const PackedSequences& scopes,
              const Tensor& aux_grad, const Tensor& z_grad, const Output& dlogits) {
  using C = Compute<T>;
  const std::int64_t tokens = logits.dim(0), num_experts = config.num_experts, k = config.top_k;
  const std::vector<std::int64_t> scope = ScopeOfTokens(scopes, tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<C> grad(static_cast<std::size_t>(num_experts), C(0));
    const std::int64_t row = scope[static_cast<std::size_t>(t)];
    if (!token_mask || token_mask.data<std::uint8_t>()[t] != 0) {
      const Token<C> token(config, logits.data<T>() + t * num_experts);
      if (dprobs) {
        AddProbabilityGradient(config, token, experts.data<std::int32_t>() + t * k,
                               dprobs.data<C>() + t * k, grad);
      }
      if (aux_grad && row >= 0) {
        AddAuxiliaryGradient(config, token, aux_grad.data<double>() + row * num_experts, grad);
      }
      if (z_grad && row >= 0) {
        // d(lse²)/dl = 2·lse·softmax(l)
        const C factor = 2 * static_cast<C>(z_grad.data<double>()[row]) * token.log_sum_exp;
        for (std::size_t e = 0; e < grad.size(); ++e) {
          grad[e] += factor * std::exp(token.logits[e] - token.log_sum_exp);
        }
      }
    }
    T* to = dlogits.tensor.data<T>() + t * num_experts;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const C value = grad[static_cast<std::size_t>(e)];
      to[e] = T(dlogits.mode == WriteMode::kAccumulate ? C(to[e]) + value : value);
    }
  }
}

void ForwardRef(const Context&, const RouterConfig& config, const Tensor& logits,
                const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                const RouterOutputs& out) {
  DispatchFloat("router", logits.dtype(), [&](auto tag) {
    Forward<typename decltype(tag)::type>(config, logits, bias, token_mask, scopes, out);
  });
}

void BackwardRef(const Context&, const RouterConfig& config, const Tensor& dprobs,
                 const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                 const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                 const Output& dlogits) {
  DispatchFloat("router", logits.dtype(), [&](auto tag) {
    Backward<typename decltype(tag)::type>(config, dprobs, logits, experts, token_mask, scopes,
                                           aux_grad, z_grad, dlogits);
  });
}

}  // namespace

constinit const RouterImpl kRouterRef = {"ref", SupportsRouter, {ForwardRef, BackwardRef}};

}  // namespace cistron::ops
