// Verification of numerics files: the golden ones pass with every implementation, and each kind of
// wrong value, a missing and an unknown tensor are noticed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/io/safetensors.h"
#include "cistron/train/verify.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

fs::path Golden(int file) {
  return std::string(CISTRON_SOURCE_DIR "/tests/golden/numerics") + (file == 1 ? "" : "2") +
         ".safetensors";
}

TEST(VerifyNumerics, GoldenFilesPassWithEveryImplementation) {
  for (const int file : {1, 2}) {
    for (const char* impl : {"", "ref"}) {
      const VerifyReport report = VerifyNumerics(ops::Context().WithImpl(impl), Golden(file));
      EXPECT_TRUE(report.ok()) << FormatVerifyReport(report);
      EXPECT_GE(report.rows.size(), 15u);
    }
  }
}

// A copy of a golden file in which one tensor is replaced, or left out, and the report on it.
VerifyReport Replaced(int file, const std::string& name,
                      const std::function<std::optional<Tensor>(const Tensor&)>& replacement) {
  const io::SafetensorsFile golden(Golden(file));
  std::vector<io::NamedTensor> tensors;
  for (const auto& entry : golden.entries()) {
    const Tensor t = golden.Read(entry.name);
    const std::optional<Tensor> kept = entry.name == name ? replacement(t) : t;
    if (kept) tensors.push_back({entry.name, *kept});
  }
  const fs::path path =
      fs::temp_directory_path() / fmt::format("numerics-{}.safetensors", getpid());
  io::WriteSafetensors(path, tensors, {});
  const auto remove = std::unique_ptr<const fs::path, void (*)(const fs::path*)>(
      &path, [](const fs::path* p) { fs::remove(*p); });
  return VerifyNumerics(ops::Context(), path);
}

// One tensor changed in place; without a change left out.
VerifyReport Changed(int file, const std::string& name,
                     const std::function<void(const Tensor&)>& change) {
  return Replaced(file, name, [&](const Tensor& t) -> std::optional<Tensor> {
    if (!change) return std::nullopt;
    change(t);
    return t;
  });
}

// What is expected must be all of it: neither a part nor another type passes.
TEST(VerifyNumerics, NoticesTruncatedTensorsAndOtherTypes) {
  struct Case {
    int file;
    const char *tensor, *row;
  };
  const std::vector<Case> cases = {
      {1, "mxfp8.96x160.wide.e4m3.rowwise.scales", "mxfp8 e4m3 scales"},
      {1, "mxfp8.96x160.wide.e4m3.columnwise.scales", "mxfp8 e4m3 scales"},
      {1, "mxfp8.96x160.wide.e4m3.columnwise.codes", "mxfp8 e4m3 codes"},
      {2, "grouped.e4m3.columnwise.scales", "grouped mxfp8 scales"},
      {2, "grouped.e4m3.rowwise.scales", "grouped mxfp8 scales"},
      {2, "grouped.w1.block32x32.scales", "mxfp8 32x32 scales"},
      {1, "block1x128.e4m3.200x300.wide.scale_inv", "block 1x128 scales"},
      {2, "current.normal.e5m2.scale", "current e5m2 scales"},
      {2, "delayed.history5.max.margin2.e5m2.scale_after_step", "delayed scales"},
      {2, "swizzle.200x9.tiles", "scale tiles"},
      {1, "router.33x16k4.softmax.topk_experts", "router choice"},
      {1, "router.33x16k4.tokens_per_expert", "router counts"},
      {1, "router.33x16k4.permute.source_token", "permutation"},
      {2, "router_edge.24x16.k4.topk_experts", "router edges"},
      {2, "router_group.40x32.groups8kept4.k8.topk_experts", "router groups"}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.tensor);
    const auto only_its_row_fails = [&](const VerifyReport& report) {
      for (const VerifyRow& row : report.rows)
        EXPECT_EQ(row.ok, row.quantity != c.row) << row.quantity;
    };
    only_its_row_fails(Replaced(
        c.file, c.tensor, [](const Tensor& t) { return t.Slice(0, 0, t.dim(0) - 1).Clone(); }));
  }
  // The same bytes by another name.
  for (const auto& [tensor, row, dtype] :
       {std::tuple{"router.33x16k4.softmax.topk_experts", "router choice", DType::kF32},
        {"router.33x16k4.tokens_per_expert", "router counts", DType::kF64}}) {
    SCOPED_TRACE(tensor);
    const VerifyReport report = Replaced(1, tensor, [&, &type = dtype](const Tensor& t) {
      Tensor other = Tensor::Empty(t.shape(), type);
      std::memcpy(other.raw(), t.raw(), static_cast<std::size_t>(t.bytes()));
      return other;
    });
    for (const VerifyRow& r : report.rows) EXPECT_EQ(r.ok, r.quantity != row) << r.quantity;
  }
}

TEST(VerifyNumerics, NoticesOneWrongValueOfEveryKind) {
  const auto flip = [](const Tensor& t) {  // the last bit of the last byte-sized or integer value
    static_cast<std::uint8_t*>(t.raw())[t.bytes() - static_cast<std::int64_t>(SizeOf(t.dtype()))] ^=
        1;
  };
  const auto scale = [](const Tensor& t) {  // the largest value, by a ten-thousandth
    DispatchFloat("test", t.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      T* largest = t.data<T>();
      for (T& v : t.span<T>()) {
        if (std::abs(static_cast<double>(v)) > std::abs(static_cast<double>(*largest)))
          largest = &v;
      }
      *largest = T(static_cast<Compute<T>>(*largest) * static_cast<Compute<T>>(1.0001));
    });
  };
  struct Case {
    int file;
    const char *tensor, *row;
    std::function<void(const Tensor&)> change;
  };
  const std::vector<Case> cases = {
      {1, "mxfp8.96x160.wide.e5m2.columnwise.codes", "mxfp8 e5m2 codes", flip},
      {1, "mxfp8.96x160.wide.e5m2.columnwise.scales", "mxfp8 e5m2 scales", flip},
      {2, "edge.40x72.e4m3.rowwise.codes", "mxfp8 e4m3 codes", flip},
      {1, "block1x128.e4m3.200x300.wide.scale_inv", "block 1x128 scales", scale},
      {2, "current.normal.e5m2.scale", "current e5m2 scales", scale},
      {2, "delayed.history5.max.margin2.e5m2.scale_after_step", "delayed scales", scale},
      {2, "swizzle.200x9.tiles", "scale tiles", flip},
      {2, "grouped.mxfp8.dw", "grouped mxfp8 dw", scale},
      {2, "grouped.w3.block32x32.codes", "mxfp8 32x32 codes", flip},
      {1, "scaled_swiglu.13x96.dx", "scaled swiglu gradients", scale},
      {1, "router.33x16k4.softmax.topk_experts", "router choice", flip},
      {1, "router.33x16k4.permute.source_slot", "permutation", flip},
      {1, "router.7x128k8.z_loss_unit", "z loss",
       [](const Tensor& t) { t.data<double>()[0] *= 1.001; }},
      {2, "router_grad.40x32.k4.sigmoid.dlogits", "router gradients", scale},
      {2, "router_group.40x32.k1.probs", "router group probabilities", scale},
      {2, "unpermute.y", "unpermutation", scale},
      {2, "schedule.warmup4.decay20.floor0.1.peak0.001", "schedule", scale}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.tensor);
    const VerifyReport report = Changed(c.file, c.tensor, c.change);
    for (const VerifyRow& row : report.rows)
      EXPECT_EQ(row.ok, row.quantity != c.row) << row.quantity;
  }
}

TEST(VerifyNumerics, UnknownAndMissingTensorsAreNamed) {
  const auto rename = [](const std::string& from, const std::string& to) {
    const io::SafetensorsFile golden(Golden(2));
    std::vector<io::NamedTensor> tensors;
    for (const auto& entry : golden.entries()) {
      tensors.push_back({entry.name == from ? to : entry.name, golden.Read(entry.name)});
    }
    const fs::path path =
        fs::temp_directory_path() / fmt::format("renamed-{}.safetensors", getpid());
    io::WriteSafetensors(path, tensors, {});
    return path;
  };
  const fs::path path = rename("unpermute.y", "unpermute.z");
  const VerifyReport report = VerifyNumerics(ops::Context(), path);
  EXPECT_FALSE(report.ok());
  EXPECT_THAT(FormatVerifyReport(report), HasSubstr("not compared"));
  EXPECT_THAT(FormatVerifyReport(report), HasSubstr("unpermute.z"));
  fs::remove(path);
  EXPECT_THAT([] { Changed(2, "swizzle.128x4.tiles", nullptr); },
              ThrowsMessage<Error>(HasSubstr("swizzle.128x4.tiles")));
}

}  // namespace
}  // namespace cistron::train
