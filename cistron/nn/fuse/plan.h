// The fuser: rewrites windows of basic ops into fused ops, by ordered lists of patterns.
//
// A joint pattern replaces a window in forward and in backward; a forward or backward pattern in
// one of them, and leaves and finds the records of the basic ops. Joint patterns go first, each
// list in its order, windows from the first op on; windows of one direction do not overlap. A plan
// expands back to the ops it was made from (checked), and is made anew when its PlanKey changes.
// Which gradients are wanted is known when backward begins: joint steps stand, and the rest of
// backward is planned anew for the mask.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/nn/basic_op.h"
#include "cistron/quant/recipe.h"
#include "cistron/tensor/device.h"

namespace cistron::nn::fuse {

// Stands for a window of basic ops, whose parameters and state it borrows.
class FusedOp {
 public:
  virtual ~FusedOp() = default;
  virtual std::string_view name() const = 0;  // "GroupedMLP"
  virtual Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                         Saved* saved) const = 0;
  virtual Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                          Saved& saved) const = 0;
};

using Window = std::span<const BasicOp* const>;

// What a plan depends on besides the ops.
struct PlanKey {
  Device device;
  DType dtype = DType::kF32;           // of x
  bool training = false;               // there will be a backward
  std::vector<quant::Recipe> recipes;  // of each op
  // Wanted of the window; read by backward patterns alone, false at most where it begins with op 0.
  bool input_gradient = true;
  bool fuse = true;
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

// Answer of a pattern to a window whose kinds it matches.
struct Verdict {
  bool fires = true;
  std::string op;      // that stands in the way
  std::string reason;  // why
  std::string remedy;  // what to change

  static Verdict Fires() { return {}; }
  static Verdict Refuses(std::string op, std::string reason, std::string remedy) {
    return {false, std::move(op), std::move(reason), std::move(remedy)};
  }
};

struct Pattern {
  std::string_view name;
  std::span<const std::string_view> kinds;  // of the window
  // `recipes`: of the window's ops.
  Verdict (*matches)(Window window, std::span<const quant::Recipe> recipes, const PlanKey& key);
  std::shared_ptr<const FusedOp> (*make)(Window window);
};
std::span<const Pattern> JointPatterns();
std::span<const Pattern> ForwardPatterns();
std::span<const Pattern> BackwardPatterns();

// Ops [begin, end), run by `fused` or, where it is null, by the one basic op.
struct PlanStep {
  std::size_t begin = 0, end = 0;
  std::shared_ptr<const FusedOp> fused;
  bool joint = false;
};
struct Refusal {
  std::string_view pattern;
  std::string direction;  // "joint", "forward", "backward"
  Verdict verdict;
  bool kinds_match = false;  // the window is there, and something about it stands in the way
  bool needed = true;        // false: another pattern has the ops, as `reason` says
};
struct Plan {
  PlanKey key;
  std::vector<PlanStep> forward, backward;  // both in the order of the ops
  std::vector<Refusal> refusals;            // one for every pattern that did not fire
};

Plan MakePlan(Window ops, const PlanKey& key);

// `plan` with backward planned for another gradient mask; its joint ops are those of `plan`, whose
// records they take.
Plan WithInputGradient(const Plan& plan, Window ops, bool input_gradient);

// Throws kInternal unless the steps of each direction cover every op once, in order, and the joint
// ones are alike in both.
void CheckExpands(const Plan& plan, std::size_t num_ops);

// The patterns whose window is there and which do not fire, a line each: pattern, op, reason and
// remedy. What strict refuses.
std::vector<std::string> DescribeRefusals(const Plan& plan);

// The plan in words, the steps of each direction in the order in which they run; see
// Sequential::Explain.
std::string Describe(const Plan& plan, Window ops);

}  // namespace cistron::nn::fuse
