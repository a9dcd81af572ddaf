// router on a GPU. A warp a token chooses and makes probabilities; statistics are summed in fp64
// over fixed parts of each scope, then the parts in order.
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/router/router_impls.h"
#include "cistron/ops/router/router_token.cuh"

namespace cistron::ops {
namespace {

using internal::CheckLaunch;
using internal::DataOrNull;
using internal::kThreads;
using internal::Lane;
using internal::RouterOptions;
using internal::StreamOf;
using internal::TokenSums;
using internal::Value;

enum TokenState : unsigned char { kMasked, kFinite, kNonfinite };

// --- forward: choice and probabilities

template <class T>
struct ForwardArgs {
  using C = Compute<T>;
  std::int64_t tokens;
  const T* logits;
  const C* bias;              // or null
  const unsigned char* mask;  // or null
  std::int32_t* experts;
  C* probs;
  // For the statistics.
  C* sums;  // [3, T]: largest logit, Σ scores, log-sum-exp
  unsigned char* states;
};

// Bytes of shared memory of a warp: logits, scores and keys of all experts; keys and marks of the
// groups.
template <class C>
__host__ __device__ std::size_t WarpBytes(const RouterOptions& options) {
  const std::size_t experts = static_cast<std::size_t>(options.experts);
  const std::size_t groups = static_cast<std::size_t>(options.groups);
  return ((3 * experts + groups) * sizeof(C) + groups + 15) / 16 * 16;
}

template <class C>
__device__ C* OwnShared(const RouterOptions& options) {
  extern __shared__ __align__(16) unsigned char shared[];
  return reinterpret_cast<C*>(shared + threadIdx.x / 32 * WarpBytes<C>(options));
}

template <class T>
__global__ void router_forward_kernel(RouterOptions options, ForwardArgs<T> args) {
  using C = Compute<T>;
  const std::int64_t t = internal::GridStart() / 32;
  if (t >= args.tokens) return;
  const int experts = options.experts, top_k = options.top_k, lane = Lane();
  std::int32_t* to_experts = args.experts + t * top_k;
  C* to_probs = args.probs + t * top_k;
  if (args.mask != nullptr && args.mask[t] == 0) {
    if (lane < top_k) {
      to_experts[lane] = -1;
      to_probs[lane] = 0;
    }
    if (lane == 0) args.states[t] = kMasked;
    return;
  }
  C* logits = OwnShared<C>(options);
  C *scores = logits + experts, *keys = scores + experts, *group_keys = keys + experts;
  auto* kept = reinterpret_cast<unsigned char*>(group_keys + options.groups);
  const TokenSums<C> sums = internal::LoadToken(options, args.logits + t * experts, logits, scores);
  bool finite = true;
  for (int e = lane; e < experts; e += 32) {
    finite = finite && isfinite(logits[e]);
    const C key = options.sigmoid() ? scores[e] : logits[e];
    keys[e] = args.bias ? key + args.bias[e] : key;
  }
  __syncwarp();
  if (options.groups > 1) internal::KeepGroups(options, keys, group_keys, kept);

  int chosen = 0;  // of slot `lane`
  internal::Ranked<C> last{C(0), -1};
  for (int i = 0; i < top_k; ++i) {
    last = internal::WarpNextOf(keys, experts, last, options.groups > 1 ? kept : nullptr,
                                experts / options.groups);
    if (lane == i) chosen = last.index;
  }
  const C p = internal::Probability(options, sums, logits, scores, chosen);
  if (lane < top_k) {
    to_experts[lane] = chosen;
    to_probs[lane] = p * static_cast<C>(options.routed_scaling);
  }
  finite = __all_sync(0xffffffffu, finite);
  if (lane == 0) {
    args.sums[t] = sums.largest;
    args.sums[args.tokens + t] = sums.of_scores;
    args.sums[2 * args.tokens + t] = sums.log_sum_exp;
    args.states[t] = finite ? kFinite : kNonfinite;
  }
}

// --- statistics

// Tokens of a scope, cut to those that there are.
struct Scopes {
  const std::int64_t* cu_seqlens;  // null: one scope of all tokens
  std::int64_t number, tokens;

  __device__ std::int64_t Cut(std::int64_t t) const { return max(std::int64_t{0}, min(t, tokens)); }
  __device__ std::int64_t Begin(std::int64_t r) const {
    return cu_seqlens ? Cut(cu_seqlens[r]) : 0;
  }
  __device__ std::int64_t End(std::int64_t r) const {
    return cu_seqlens ? Cut(cu_seqlens[r + 1]) : tokens;
  }
  // The scope of a token, −1 outside of all: the last one that begins at or before it.
  __device__ std::int64_t Of(std::int64_t t) const {
    if (cu_seqlens == nullptr) return 0;
    std::int64_t low = 0, high = number + 1;  // entries before `low` are ≤ t, from `high` on > t
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (cu_seqlens[middle] <= t) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low - 1 < number ? low - 1 : -1;
  }
};

// Tokens whose statistics one block adds up before it goes on to another such piece.
constexpr std::int64_t kPiece = 64;

template <class T>
struct StatisticsArgs {
  using C = Compute<T>;
  const T* logits;
  const std::int32_t* experts;
  const C* sums;
  const unsigned char* states;
  // Sums of the parts, each part a block: [R, parts, E], [R, parts, E], [R, parts].
  std::int32_t* counts;
  double* score_sums;
  double* z_sums;
};

// Block (part, scope) takes the pieces part, part + parts, … of its scope.
template <class T>
__global__ void router_statistics_kernel(RouterOptions options, Scopes scopes,
                                         StatisticsArgs<T> args) {
  using C = Compute<T>;
  extern __shared__ int histogram[];
  __shared__ double scratch[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t parts = gridDim.x, scope = blockIdx.y;
  const std::int64_t cell = scope * parts + blockIdx.x;
  const std::int64_t begin = scopes.Begin(scope), end = scopes.End(scope);
  const std::int64_t first = begin + blockIdx.x * kPiece, step = parts * kPiece;
  const std::int64_t tokens = scopes.tokens;

  for (int e = thread; e < options.experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
  double z_sum = 0;
  for (std::int64_t base = first; base < end; base += step) {
    const std::int64_t size = min(kPiece, end - base);
    for (std::int64_t i = thread; i < size * options.top_k; i += kThreads) {
      const int e = args.experts[base * options.top_k + i];
      if (e >= 0) atomicAdd(&histogram[e], 1);
    }
    if (thread < size && args.states[base + thread] != kMasked) {
      const double z = args.sums[2 * tokens + base + thread];
      z_sum += z * z;
    }
  }
  __syncthreads();
  for (int e = thread; e < options.experts; e += kThreads) {
    args.counts[cell * options.experts + e] = histogram[e];
  }

  // `across` experts at a time, the other threads on other tokens.
  int across = 1;
  while (across < options.experts && across < kThreads) across *= 2;
  const int lanes = kThreads / across, own_lane = thread / across;
  for (int from = 0; from < options.experts; from += across) {
    const int e = from + thread % across;
    double sum = 0;
    for (std::int64_t base = first; base < end && e < options.experts; base += step) {
      const std::int64_t size = min(kPiece, end - base);
      for (std::int64_t i = own_lane; i < size; i += lanes) {
        const std::int64_t t = base + i;
        if (args.states[t] == kMasked) continue;
        const C score =
            internal::ScoreOf(options, Value(args.logits[t * options.experts + e]), args.sums[t]);
        sum += static_cast<double>(score / args.sums[tokens + t]);
      }
    }
    scratch[thread] = sum;
    __syncthreads();
    if (own_lane == 0 && e < options.experts) {
      for (int lane = 1; lane < lanes; ++lane) sum += scratch[lane * across + thread];
      args.score_sums[cell * options.experts + e] = sum;
    }
    __syncthreads();
  }
  z_sum = internal::BlockSum(z_sum, scratch);
  if (thread == 0) args.z_sums[cell] = z_sum;
}

// Sums of the parts. A warp an expert and scope; outputs may be null.
__global__ void router_sum_parts_kernel(std::int64_t scopes, std::int64_t experts,
                                        std::int64_t parts, const std::int32_t* part_counts,
                                        const double* part_scores, const double* part_z,
                                        std::int64_t* counts, double* score_sums, double* z_sums) {
  for (std::int64_t i = internal::GridStart() / 32; i < scopes * experts;
       i += internal::GridStep() / 32) {
    const std::int64_t scope = i / experts, e = i % experts;
    std::int64_t count = 0;
    double score = 0, z = 0;
    for (std::int64_t part = Lane(); part < parts; part += 32) {
      const std::int64_t cell = scope * parts + part;
      count += part_counts[cell * experts + e];
      score += part_scores[cell * experts + e];
      z += part_z[cell];
    }
    count = internal::WarpSum(count);
    score = internal::WarpSum(score);
    z = internal::WarpSum(z);
    if (Lane() != 0) continue;
    if (counts != nullptr) counts[i] = count;
    if (score_sums != nullptr) score_sums[i] = score;
    if (z_sums != nullptr && e == 0) z_sums[scope] = z;
  }
}

__global__ void router_count_nonfinite_kernel(std::int64_t tokens, const unsigned char* states,
                                              std::int64_t* out) {
  __shared__ std::int64_t scratch[33];
  std::int64_t count = 0;
  for (std::int64_t t = threadIdx.x; t < tokens; t += blockDim.x) count += states[t] == kNonfinite;
  count = internal::BlockSum(count, scratch);
  if (threadIdx.x == 0) *out = count;
}

Scopes ScopesOf(const PackedSequences& scopes, std::int64_t tokens) {
  return {DataOrNull<std::int64_t>(scopes.cu_seqlens), NumScopes(scopes), tokens};
}

// Blocks that share a scope: as many as fill the GPU, and no more than its longest scope has
// pieces.
std::int64_t PartsOf(const PackedSequences& scopes, std::int64_t tokens) {
  constexpr std::int64_t kBlocks = 512;
  const bool bounded = scopes.cu_seqlens && scopes.max_length > 0;
  const std::int64_t longest = bounded ? std::min(scopes.max_length, tokens) : tokens;
  const std::int64_t most = std::max<std::int64_t>(1, kBlocks / NumScopes(scopes));
  return std::clamp<std::int64_t>((longest + kPiece - 1) / kPiece, 1, most);
}

template <class T>
void Statistics(const Context& ctx, const RouterOptions& options, const PackedSequences& scopes,
                StatisticsArgs<T> args, std::int64_t tokens, const RouterOutputs& out) {
  const std::int64_t rows = NumScopes(scopes);
  if (rows == 0) return;
  // A grid has at most 2^16 − 1 rows of blocks.
  CISTRON_CHECK(rows < 65536, "router: {} scopes of statistics are too many", rows);
  const std::int64_t parts = PartsOf(scopes, tokens);
  const Tensor counts = ctx.Empty({rows, parts, options.experts}, DType::kI32);
  const Tensor scores = ctx.Empty({rows, parts, options.experts}, DType::kF64);
  const Tensor z = ctx.Empty({rows, parts}, DType::kF64);
  args.counts = counts.data<std::int32_t>();
  args.score_sums = scores.data<double>();
  args.z_sums = z.data<double>();
  router_statistics_kernel<T>
      <<<dim3(static_cast<unsigned>(parts), static_cast<unsigned>(rows)), kThreads,
         static_cast<std::size_t>(options.experts) * sizeof(int), StreamOf(ctx)>>>(
          options, ScopesOf(scopes, tokens), args);
  CheckLaunch("router statistics");
  router_sum_parts_kernel<<<internal::BlocksFor(32 * rows * options.experts), kThreads, 0,
                            StreamOf(ctx)>>>(
      rows, options.experts, parts, args.counts, args.score_sums, args.z_sums,
      DataOrNull<std::int64_t>(out.counts), DataOrNull<double>(out.score_sums),
      DataOrNull<double>(out.z_sums));
  CheckLaunch("router statistics");
}

// Warps of a block whose shared memory fits without asking for more than the usual.
unsigned WarpsOf(std::size_t warp_bytes) {
  constexpr std::size_t kSharedBytes = 48 << 10;
  unsigned warps = 8;
  while (warps > 1 && warps * warp_bytes > kSharedBytes) warps /= 2;
  return warps;
}

template <class T>
void ForwardTyped(const Context& ctx, const RouterConfig& config, const Tensor& logits,
                  const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                  const RouterOutputs& out) {
  using C = Compute<T>;
  const RouterOptions options(config);
  const std::int64_t tokens = logits.dim(0);
  const Tensor sums = ctx.Empty({3, tokens}, ComputeType(logits.dtype()));
  const Tensor states = ctx.Empty({tokens}, DType::kU8);
  ForwardArgs<T> args{};
  args.tokens = tokens;
  args.logits = logits.data<T>();
  args.bias = DataOrNull<C>(bias);
  args.mask = DataOrNull<std::uint8_t>(token_mask);
  args.experts = out.experts.data<std::int32_t>();
  args.probs = out.probs.data<C>();
  args.sums = sums.data<C>();
  args.states = states.data<std::uint8_t>();
  if (tokens > 0) {
    const std::size_t bytes = WarpBytes<C>(options);
    const unsigned warps = WarpsOf(bytes);
    router_forward_kernel<T><<<static_cast<unsigned>((tokens + warps - 1) / warps), warps * 32,
                               warps * bytes, StreamOf(ctx)>>>(options, args);
    CheckLaunch("router");
  }
  if (out.counts || out.score_sums || out.z_sums) {
    StatisticsArgs<T> statistics{};
    statistics.logits = args.logits;
    statistics.experts = args.experts;
    statistics.sums = args.sums;
    statistics.states = args.states;
    Statistics<T>(ctx, options, scopes, statistics, tokens, out);
  }
  if (out.nonfinite_tokens) {
    router_count_nonfinite_kernel<<<1, 1024, 0, StreamOf(ctx)>>>(
        tokens, args.states, out.nonfinite_tokens.data<std::int64_t>());
    CheckLaunch("router");
  }
}

// --- backward

template <class T>
struct BackwardArgs {
  using C = Compute<T>;
  std::int64_t tokens;
  const C* dprobs;  // or null
  const T* logits;
  const std::int32_t* experts;
  const unsigned char* mask;
  const double* aux_grad;
  const double* z_grad;
  T* dlogits;
  bool accumulate;
};

// Adds the gradient of Σ dprobs·probs to `grad` [E].
template <class T>
__device__ void AddProbabilityGradient(const RouterOptions& options, const BackwardArgs<T>& args,
                                       std::int64_t t, const TokenSums<Compute<T>>& sums,
                                       const Compute<T>* logits, const Compute<T>* scores,
                                       Compute<T>* grad) {
  using C = Compute<T>;
  const int lane = Lane(), top_k = options.top_k;
  const int named = lane < top_k ? args.experts[t * top_k + lane] : -1;
  // An expert that does not exist has no gradient.
  const bool valid = named >= 0 && named < options.experts;
  const int chosen = valid ? named : 0;
  const C p = internal::Probability(options, sums, logits, scores, chosen);
  const C upstream =
      valid ? args.dprobs[t * top_k + lane] * static_cast<C>(options.routed_scaling) : C(0);
  const C inner = internal::SumInOrder(upstream * p, top_k, C(0));
  const C sum = internal::SumInOrder(valid ? scores[chosen] : C(0), top_k, options.epsilon<C>());
  if (!options.sigmoid() && !options.normalizes) {
    // Every expert shares the denominator.
    for (int e = lane; e < options.experts; e += 32)
      grad[e] -= inner * (scores[e] / sums.of_scores);
    __syncwarp();
  }
  if (valid) {
    if (options.sigmoid()) {
      const C s = scores[chosen];
      const C ds = options.normalizes ? (upstream - inner) / sum : upstream;
      grad[chosen] += ds * s * (1 - s);
    } else {
      grad[chosen] += p * (options.normalizes ? upstream - inner : upstream);
    }
  }
  __syncwarp();
}

template <class T>
__global__ void router_backward_kernel(RouterOptions options, Scopes scopes, BackwardArgs<T> args) {
  using C = Compute<T>;
  const std::int64_t t = internal::GridStart() / 32;
  if (t >= args.tokens) return;
  const int experts = options.experts, lane = Lane();
  C* logits = OwnShared<C>(options);
  C *scores = logits + experts, *grad = scores + experts;
  for (int e = lane; e < experts; e += 32) grad[e] = 0;
  __syncwarp();
  if (args.mask == nullptr || args.mask[t] != 0) {
    const TokenSums<C> sums =
        internal::LoadToken(options, args.logits + t * experts, logits, scores);
    const std::int64_t scope = scopes.Of(t);
    if (args.dprobs != nullptr) {
      AddProbabilityGradient(options, args, t, sums, logits, scores, grad);
    }
    if (args.aux_grad != nullptr && scope >= 0) {
      const double* aux = args.aux_grad + scope * experts;
      C inner = 0;
      for (int e = lane; e < experts; e += 32) {
        inner += static_cast<C>(aux[e]) * (scores[e] / sums.of_scores);
      }
      inner = internal::WarpSum(inner);
      for (int e = lane; e < experts; e += 32) {
        const C difference = static_cast<C>(aux[e]) - inner, s = scores[e];
        grad[e] += options.sigmoid() ? difference / sums.of_scores * s * (1 - s)
                                     : difference * (s / sums.of_scores);
      }
    }
    if (args.z_grad != nullptr && scope >= 0) {
      // d(lse²)/dl = 2·lse·softmax(l)
      const C factor = 2 * static_cast<C>(args.z_grad[scope]) * sums.log_sum_exp;
      for (int e = lane; e < experts; e += 32) {
        grad[e] += factor * internal::RouterExp(logits[e] - sums.log_sum_exp);
      }
    }
  }
  T* to = args.dlogits + t * experts;
  for (int e = lane; e < experts; e += 32) {
    internal::StoreElement(to[e], grad[e], args.accumulate);
  }
}

template <class T>
void BackwardTyped(const Context& ctx, const RouterConfig& config, const Tensor& dprobs,
                   const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                   const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                   const Output& dlogits) {
  using C = Compute<T>;
  const RouterOptions options(config);
  BackwardArgs<T> args{};
  args.tokens = logits.dim(0);
  args.dprobs = DataOrNull<C>(dprobs);
  args.logits = logits.data<T>();
  args.experts = DataOrNull<std::int32_t>(experts);
  args.mask = DataOrNull<std::uint8_t>(token_mask);
  args.aux_grad = DataOrNull<double>(aux_grad);
  args.z_grad = DataOrNull<double>(z_grad);
  args.dlogits = dlogits.tensor.data<T>();
  args.accumulate = internal::Accumulates(dlogits);
  if (args.tokens == 0) return;
  const std::size_t bytes = WarpBytes<C>(options);
  const unsigned warps = WarpsOf(bytes);
  router_backward_kernel<T>
      <<<static_cast<unsigned>((args.tokens + warps - 1) / warps), warps * 32, warps * bytes,
         StreamOf(ctx)>>>(options, ScopesOf(scopes, args.tokens), args);
  CheckLaunch("router backward");
}

void ForwardCuda(const Context& ctx, const RouterConfig& config, const Tensor& logits,
                 const Tensor& bias, const Tensor& token_mask, const PackedSequences& scopes,
                 const RouterOutputs& out) {
  DispatchFloat("router", logits.dtype(), [&](auto tag) {
    ForwardTyped<typename decltype(tag)::type>(ctx, config, logits, bias, token_mask, scopes, out);
  });
}

void BackwardCuda(const Context& ctx, const RouterConfig& config, const Tensor& dprobs,
                  const Tensor& logits, const Tensor& experts, const Tensor& token_mask,
                  const PackedSequences& scopes, const Tensor& aux_grad, const Tensor& z_grad,
                  const Output& dlogits) {
  DispatchFloat("router", logits.dtype(), [&](auto tag) {
    BackwardTyped<typename decltype(tag)::type>(ctx, config, dprobs, logits, experts, token_mask,
                                                scopes, aux_grad, z_grad, dlogits);
  });
}

Support SupportsRouter(const RouterProblem& problem) {
  if (problem.config.given_experts) return Support::No("given experts are for the reference");
  return internal::FloatsOnCuda(problem);
}

}  // namespace

extern constinit const RouterImpl kRouterCuda = {
    "cuda", SupportsRouter, {ForwardCuda, BackwardCuda}, DeviceType::kCuda};

}  // namespace cistron::ops
