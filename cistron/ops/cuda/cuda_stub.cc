// A build without CUDA. The implementations say what they support, as in a build with it, and are
// never run, because no context of a CUDA device can be made.
#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/activation/scaled_activation_impls.h"
#include "cistron/ops/attention/attention_impls.h"
#include "cistron/ops/attention/attention_supports_cuda.h"
#include "cistron/ops/attention/attention_supports_cudnn.h"
#include "cistron/ops/attention/attention_supports_flash.h"
#include "cistron/ops/balance_loss/balance_loss_impls.h"
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/embedding/embedding_impls.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/gemm_supports_cuda.h"
#include "cistron/ops/grouped_bias/grouped_bias_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_supports_hopper.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_impls.h"
#include "cistron/ops/grouped_mlp/grouped_mlp_supports_hopper.h"
#include "cistron/ops/jitter/jitter_impls.h"
#include "cistron/ops/norm/norm_impls.h"
#include "cistron/ops/optimizer/adamw_impls.h"
#include "cistron/ops/permute/permute_impls.h"
#include "cistron/ops/reduce/reduce_impls.h"
#include "cistron/ops/rope/rope_impls.h"
#include "cistron/ops/router/router_impls.h"

namespace cistron::ops {

using internal::FloatsOnCuda;
using internal::GemmCudaSupports;

namespace internal {
constinit const SwiGluImpl kSwiGluCuda = {
    "cuda", FloatsOnCuda<SwiGluProblem>, {}, DeviceType::kCuda};
constinit const ScaledActivationImpl kScaledActivationCuda = {
    "cuda", FloatsOnCuda<ScaledActivationProblem>, {}, DeviceType::kCuda};
}  // namespace internal
constinit const AdamWImpl kAdamWCuda = {"cuda", SupportsAdamWOnCuda, {}, DeviceType::kCuda};
constinit const BalanceLossImpl kBalanceLossCuda = {
    "cuda", FloatsOnCuda<BalanceLossProblem>, {}, DeviceType::kCuda};
constinit const EmbeddingImpl kEmbeddingCuda = {
    "cuda", FloatsOnCuda<EmbeddingProblem>, {}, DeviceType::kCuda};
constinit const GroupedBiasImpl kGroupedBiasCuda = {
    "cuda", FloatsOnCuda<GroupedBiasProblem>, {}, DeviceType::kCuda};
constinit const JitterImpl kJitterCuda = {
    "cuda", FloatsOnCuda<JitterProblem>, {}, DeviceType::kCuda};
constinit const AttentionImpl kAttentionCudnn = {
    "cudnn", internal::AttentionCudnnSupports<true>, {}, DeviceType::kCuda};
constinit const AttentionImpl kAttentionCudnnAtomics = {
    "cudnn_atomics", internal::AttentionCudnnSupports<false>, {}, DeviceType::kCuda};
constinit const AttentionImpl kAttentionFlash = {
    "flash", internal::AttentionFlashSupports, {}, DeviceType::kCuda};
constinit const AttentionImpl kAttentionCuda = {
    "cuda", internal::AttentionCudaSupports, {}, DeviceType::kCuda};
constinit const CrossEntropyImpl kCrossEntropyCuda = {
    "cuda", FloatsOnCuda<CrossEntropyProblem>, {}, DeviceType::kCuda};
constinit const GemmImpl kGemmCublas = {
    "cublas", GemmCudaSupports<GemmProblem>, {}, DeviceType::kCuda};
constinit const GemmImpl kGemmCuda = {"cuda", GemmCudaSupports<GemmProblem>, {}, DeviceType::kCuda};
constinit const GroupedGemmImpl kGroupedGemmHopper = {
    "hopper", internal::GroupedGemmHopperSupports, {}, DeviceType::kCuda};
constinit const GroupedGemmImpl kGroupedGemmCuda = {
    "cuda", GemmCudaSupports<GroupedGemmProblem>, {}, DeviceType::kCuda};
constinit const GroupedMlpImpl kGroupedMlpHopper = {
    "hopper", internal::GroupedMlpHopperSupports, {}, DeviceType::kCuda};
constinit const PermuteImpl kPermuteCuda = {
    "cuda", FloatsOnCuda<PermuteProblem>, {}, DeviceType::kCuda};
constinit const ReduceImpl kReduceCuda = {
    "cuda", FloatsOnCuda<ReduceProblem>, {}, DeviceType::kCuda};
RmsNormImpl CudaRmsNorm() {
  return {"cuda", FloatsOnCuda<RmsNormProblem>, {}, DeviceType::kCuda};
}
RopeImpl CudaRope() {
  return {"cuda", FloatsOnCuda<RopeProblem>, {}, DeviceType::kCuda};
}
constinit const RouterImpl kRouterCuda = {
    "cuda", FloatsOnCuda<RouterProblem>, {}, DeviceType::kCuda};

}  // namespace cistron::ops
