// What the tests of Sequential and of its layers run: an expert MLP, and every recipe.
#pragma once

#include <memory>
#include <string>

#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"

namespace cistron::nn {

inline constexpr std::int64_t kHidden = 40, kFfn = 48;

inline const quant::Recipe kRecipes[] = {quant::BF16{},
                                         quant::DelayedScaling{},
                                         quant::Float8CurrentScaling{},
                                         quant::Float8BlockScaling{},
                                         quant::MXFP8BlockScaling{},
                                         quant::MXFP8BlockScaling{.weights_2d = true}};

// An expert MLP with a store of its own.
struct Experts {
  explicit Experts(std::int64_t groups, DType dtype = DType::kF32, GroupedLinearOptions first = {},
                   GroupedLinearOptions second = {})
      : store(ops::Context(), dtype) {
    first.num_groups = second.num_groups = groups;
    first.in_features = second.out_features = kHidden;
    first.out_features = 2 * kFfn;
    if (second.in_features == 0) second.in_features = kFfn;
    first.name = "gate_up";
    first.bias_name = "gate_up_bias";
    second.name = "down";
    second.bias_name = "down_bias";
    first.store = second.store = &store;
    layers.Append(std::make_unique<GroupedLinear>(first));
    layers.Append(std::make_unique<ScaledSwiGLU>());
    layers.Append(std::make_unique<GroupedLinear>(second));
    store.Initialize(7, 0.3);
    for (auto& p : store.parameters()) {  // biases are drawn too, so that they matter
      DrawNormal(8, p.spec.name, 0.3, 0, p.master);
      if (p.value.raw() != p.master.raw()) Convert(p.master, p.value);
    }
    store.MarkChanged();
  }
  LocalParameterStore store;
  Sequential layers;
};

inline GroupedLinearOptions OneGroup(std::int64_t in, std::int64_t out,
                                     const std::string& name = "") {
  return {.num_groups = 1, .in_features = in, .out_features = out, .name = name};
}

}  // namespace cistron::nn
