// exp of vectors, for every instruction set (included after foreach_target.h; see vector-inl.h).
#include <hwy/contrib/math/math-inl.h>

#include "cistron/ops/vector-inl.h"

#if defined(CISTRON_OPS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_EXP_INL_H_
#undef CISTRON_OPS_EXP_INL_H_
#else
#define CISTRON_OPS_EXP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

// e^x for x ≤ 0, within 1 ulp (Highway's); NaN stays NaN, which Highway's would turn into 0; −Inf
// gives 0.
HWY_INLINE FloatVec ExpOfNonPositive(FloatVec x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(FloatTag(), x));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
