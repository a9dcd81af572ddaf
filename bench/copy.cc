#include "bench/copy.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/copy.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace cistron::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void Copy(const char* from, std::int64_t bytes, char* to) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  std::int64_t i = 0;
  for (; i + 2 * lanes <= bytes; i += 2 * lanes) {
    const auto v0 = hn::LoadU(d, in + i), v1 = hn::LoadU(d, in + i + lanes);
    hn::StoreU(v0, d, out + i);
    hn::StoreU(v1, d, out + i + lanes);
  }
  for (; i < bytes; ++i) out[i] = in[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::bench {

HWY_EXPORT(Copy);

void VectorCopy(const char* from, std::int64_t bytes, char* to) {
  HWY_DYNAMIC_DISPATCH(Copy)(from, bytes, to);
}

}  // namespace cistron::bench
#endif  // HWY_ONCE
