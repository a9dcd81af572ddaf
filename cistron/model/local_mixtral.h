// A Mixtral whole on one device: the model with its store, dispatcher and reducer.
#pragma once

#include "cistron/model/mixtral.h"

namespace cistron::model {

struct LocalMixtral {
  // `masters`: of LocalParameterStore.
  LocalMixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
               bool masters = true)
      : store(ctx, dtype, masters),
        dispatcher(config.num_local_experts),
        model(ctx, config, dtype, store, dispatcher, statistics) {}
  LocalMixtral(const LocalMixtral&) = delete;  // the model refers to its neighbours
  LocalMixtral& operator=(const LocalMixtral&) = delete;

  nn::LocalParameterStore store;
  nn::LocalTokenDispatcher dispatcher;
  nn::LocalStatisticsReducer statistics;
  Mixtral model;
};

}  // namespace cistron::model
