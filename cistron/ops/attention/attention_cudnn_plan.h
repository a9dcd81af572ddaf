// cuDNN behind functions that need none of its headers; private to this folder. In a build without
// cudnn-frontend, attention_cudnn_plan_stub.cc stands in.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <string>

namespace cistron::ops::internal {

// Operands of a plan. Matrices have a row a token; offsets say where in a matrix the sequences of a
// ragged plan begin.
enum class CudnnOperand { kQ, kK, kV, kO, kDO, kDQ, kDK, kDV, kCount };
inline constexpr int kCudnnOperands = static_cast<int>(CudnnOperand::kCount);

// Everything that a plan depends on.
struct CudnnPlanKey {
  bool backward = false, ragged = false, deterministic = true;
  std::int64_t batch = 0, length = 0;
  std::int64_t tokens = 0;  // of a ragged backward: no matrix has more rows
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0, window = 0;
  std::array<std::int64_t, kCudnnOperands> row_strides{};

  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy takes the comparison's 0 for a pointer
  auto operator<=>(const CudnnPlanKey&) const = default;
};

struct CudnnArguments {
  std::array<void*, kCudnnOperands> matrices{};
  void* stats = nullptr;    // f32 [batch, heads, length]: log-sum-exp
  void* lengths = nullptr;  // i32 [batch], of a ragged plan
  // i64 [batch + 1], of a ragged plan: elements before each sequence.
  std::array<void*, kCudnnOperands> offsets{};
};

class CudnnPlan {
 public:
  virtual ~CudnnPlan() = default;
  virtual std::int64_t workspace_bytes() const = 0;
  // `stream`: a cudaStream_t. Throws kInternal with cuDNN's message.
  virtual void Run(void* stream, const CudnnArguments& arguments, void* workspace) = 0;
};

// Why cuDNN cannot be used here; empty when it can. Loads it at the first call.
const std::string& CudnnMissing();

// Of the one that is here, "9.19.0"; empty where it cannot be used.
std::string CudnnVersion();

// The plan of the current device, made at first use. Throws kUnsupported with cuDNN's reason.
CudnnPlan& FindCudnnPlan(const CudnnPlanKey& key);
// Plans that this process has made or asked for in vain, on all devices.
std::int64_t CudnnPlansMade();

// For tests: cuDNN is taken to have no plan for anything.
inline bool cudnn_has_no_plan = false;

}  // namespace cistron::ops::internal
