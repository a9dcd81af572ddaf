#include "cistron/io/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "cistron/base/error.h"
#include "cistron/check/compare.h"
#include "cistron/io/file.h"
#include "cistron/io/manifest.h"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What f throws, "code: message"; empty when it does not.
template <class F>
std::string ErrorOf(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(ErrorCodeName(e.code())) + ": " + e.message();
  }
  return "";
}

class Checkpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    // In memory where there is such a file system: a thousand damaged copies are written.
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ::testing::TempDir();
    root_ = base / ("cistron_checkpoint_test." + std::to_string(::getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path root_;
};

Tensor Numbered(const Shape& shape, std::int64_t first) {
  Tensor t = Tensor::Empty(shape, DType::kI64);
  for (std::int64_t& v : t.span<std::int64_t>()) v = first++;
  return t;
}

CheckpointBox Whole(const std::string& name, const Tensor& tensor) {
  Shape start = tensor.shape();
  for (int d = 0; d < start.rank(); ++d) start[d] = 0;
  return {name, tensor, tensor.shape(), start};
}

fs::path SaveStep(const fs::path& root, std::int64_t step) {
  const CheckpointBox box = Whole("weight/w", Numbered({50}, step));
  return SaveCheckpoint(root, step, {&box, 1}, R"({"step": 1})");
}

void FlipByte(const fs::path& path, std::int64_t position) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(position);
  const int byte = file.get();
  file.seekp(position);
  file.put(static_cast<char>(byte ^ 0x10));
}

TEST_F(Checkpoint, SavesAndLoads) {
  std::vector<CheckpointBox> boxes;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kI64, DType::kU8}) {
    Tensor t = Tensor::Empty({3, 5}, dtype);
    for (std::int64_t i = 0; i < t.bytes(); ++i) {
      static_cast<unsigned char*>(t.raw())[i] = static_cast<unsigned char>(37 * i + 11);
    }
    boxes.push_back(Whole("weight/" + std::string(Name(dtype)), t));
  }
  boxes.push_back(Whole("scalar", Tensor::Scalar(0.1)));
  boxes.push_back(Whole("empty", Tensor::Empty({0, 3}, DType::kF32)));
  const std::string state =
      R"({"data":{"epoch":3,"position":18446744073709551615},"lr":0.1,"name":"a\"b"})";
  const fs::path path = SaveCheckpoint(root_, 12, boxes, state);
  EXPECT_EQ(path, root_ / "step-00000012");

  const CheckpointReader reader(path);
  EXPECT_EQ(reader.step(), 12);
  EXPECT_EQ(reader.state_json(), state);
  EXPECT_EQ(reader.names().size(), boxes.size());
  for (const CheckpointBox& box : boxes) {
    const auto same = check::CompareBitwise(box.name, reader.Read(box.name), box.tensor);
    EXPECT_TRUE(same) << same.message;
    EXPECT_EQ(reader.Find(box.name)->global_shape, box.global_shape);
  }
  EXPECT_FALSE(reader.Find("absent"));
  EXPECT_THAT(ErrorOf([&] { reader.Read("absent"); }),
              AllOf(HasSubstr("not found"), HasSubstr("'absent'")));
  EXPECT_EQ(reader.VerifyAll(), 15 * (8 + 4 + 2 + 8 + 1) + 8);
  EXPECT_THAT(ListCheckpoints(root_), ElementsAre(path));
}

TEST_F(Checkpoint, SavingAStepAgainReplacesIt) {
  SaveStep(root_, 7);
  const CheckpointBox box = Whole("weight/w", Numbered({2}, 99));
  const fs::path path = SaveCheckpoint(root_, 7, {&box, 1}, "{}");
  EXPECT_EQ(CheckpointReader(path).Read("weight/w").span<std::int64_t>()[0], 99);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
}

// Cuts a box at random along random dimensions until `pieces` are left to make.
void CutAtRandom(std::mt19937& random, const Shape& start, const Shape& size, int pieces,
                 std::vector<std::pair<Shape, Shape>>& out) {
  const int d =
      size.rank() == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(size.rank()));
  if (pieces <= 1 || size.rank() == 0 || size[d] < 2) {
    out.emplace_back(start, size);
    return;
  }
  const std::int64_t cut =
      1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(size[d] - 1));
  Shape low = size, high = size, high_start = start;
  low[d] = cut;
  high[d] = size[d] - cut;
  high_start[d] += cut;
  CutAtRandom(random, start, low, pieces / 2, out);
  CutAtRandom(random, high_start, high, pieces - pieces / 2, out);
}

// The part [start, start + size) of a tensor that holds its flat indices.
Tensor PartOfNumbered(const Shape& global, const Shape& start, const Shape& size) {
  Tensor t = Tensor::Empty(size, DType::kI64);
  Shape index = start;
  for (std::int64_t& v : t.span<std::int64_t>()) {
    v = 0;
    for (int d = 0; d < global.rank(); ++d) v = v * global[d] + index[d];
    for (int d = global.rank() - 1; d >= 0; --d) {
      if (++index[d] < start[d] + size[d]) break;
      index[d] = start[d];
    }
  }
  return t;
}

// What any layout saved, any other loads: nothing lost, nothing moved.
TEST_F(Checkpoint, ReshardLosesState) {
  constexpr unsigned kSeed = 17;
  std::mt19937 random(kSeed);
  for (int round = 0; round < 12; ++round) {
    std::vector<CheckpointBox> boxes;
    std::vector<Shape> shapes;
    for (int rank = 0; rank <= 4; ++rank) {
      Shape global = std::vector<Shape>{
          {}, {1}, {1, 1}, {1, 1, 1}, {1, 1, 1, 1}}[static_cast<std::size_t>(rank)];
      for (int d = 0; d < rank; ++d) global[d] = 1 + static_cast<std::int64_t>(random() % 7);
      Shape zero = global;
      for (int d = 0; d < rank; ++d) zero[d] = 0;
      std::vector<std::pair<Shape, Shape>> cut;
      CutAtRandom(random, zero, global, 1 + static_cast<int>(random() % 9), cut);
      for (const auto& [start, size] : cut) {
        boxes.push_back(
            {"rank" + std::to_string(rank), PartOfNumbered(global, start, size), global, start});
      }
      shapes.push_back(global);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    const CheckpointReader reader(SaveCheckpoint(root_, round, boxes, "{}"));
    for (int rank = 0; rank <= 4; ++rank) {
      const Shape& global = shapes[static_cast<std::size_t>(rank)];
      Shape zero = global;
      for (int d = 0; d < rank; ++d) zero[d] = 0;
      std::vector<std::pair<Shape, Shape>> cut = {{zero, global}};
      CutAtRandom(random, zero, global, 6, cut);
      for (const auto& [start, size] : cut) {
        const auto same =
            check::CompareBitwise("part", reader.Read("rank" + std::to_string(rank), start, size),
                                  PartOfNumbered(global, start, size));
        EXPECT_TRUE(same) << "seed " << kSeed << " round " << round << ": " << same.message;
      }
    }
  }
}

TEST_F(Checkpoint, RefusesGapsOverlapsAndDisagreement) {
  const Tensor part = Numbered({2, 3}, 0);
  const auto save = [&](const std::vector<CheckpointBox>& boxes, const std::string& state = "{}") {
    return ErrorOf([&] { SaveCheckpoint(root_, 1, boxes, state); });
  };
  EXPECT_THAT(save({{"t", part, {4, 3}, {0, 0}}}), AllOf(HasSubstr("'t'"), HasSubstr("[2, 0]")));
  EXPECT_THAT(save({{"t", part, {4, 3}, {0, 0}}, {"t", part, {4, 3}, {1, 0}}}),
              HasSubstr("overlap"));
  EXPECT_THAT(save({{"t", part, {4, 3}, {3, 0}}}), HasSubstr("outside"));
  EXPECT_THAT(save({{"t", part, {4, 3}, {0, 0}}, {"t", part, {5, 3}, {2, 0}}}),
              HasSubstr("disagree"));
  EXPECT_THAT(
      save({{"t", part, {4, 3}, {0, 0}}, {"t", ConvertTo(part, DType::kI32), {4, 3}, {2, 0}}}),
      HasSubstr("disagree"));
  EXPECT_THAT(save({{"t", part.Slice(1, 0, 2), {2, 2}, {0, 0}}}), HasSubstr("contiguous"));
  EXPECT_THAT(save({Whole("t", part)}, "not json"), HasSubstr("not valid JSON"));
  EXPECT_FALSE(fs::exists(root_));
  EXPECT_EQ(save({{"t", part, {4, 3}, {2, 0}}, {"t", part, {4, 3}, {0, 0}}}), "");
  EXPECT_THAT(ErrorOf([&] {
                CheckpointReader(root_ / "step-00000001").Read("t", {3, 0}, {2, 3});
              }),
              HasSubstr("not inside"));
}

TEST_F(Checkpoint, EveryFlippedByteIsFound) {
  const CheckpointBox box = Whole("weight/w", Numbered({6}, 5));
  const fs::path path = SaveCheckpoint(root_, 3, {&box, 1}, R"({"seed": 12, "lr": 0.25})");
  for (const char* name : {"manifest.json", "rank-00000.safetensors"}) {
    const std::string original = ReadFile(path / name);
    for (std::size_t i = 0; i < original.size(); ++i) {
      std::string damaged = original;
      damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
      std::ofstream(path / name, std::ios::binary) << damaged;
      // Space between tokens may change: then the content must be what it was.
      const std::string error = ErrorOf([&] {
        const CheckpointReader reader(path);
        reader.VerifyAll();
        EXPECT_EQ(reader.step(), 3);
        EXPECT_EQ(reader.state_json(), R"({"lr":0.25,"seed":12})");
        EXPECT_TRUE(check::CompareBitwise("w", reader.Read("weight/w"), box.tensor));
      });
      EXPECT_TRUE(!error.empty() || original[i] == ' ' || original[i] == '\n') << name << " " << i;
    }
    std::ofstream(path / name, std::ios::binary) << original;
  }
  // Cut short at any length.
  for (const char* name : {"manifest.json", "rank-00000.safetensors"}) {
    const std::string original = ReadFile(path / name);
    for (std::size_t n = 0; n + 2 < original.size(); n += 7) {
      std::ofstream(path / name, std::ios::binary) << original.substr(0, n);
      EXPECT_NE(ErrorOf([&] { CheckpointReader reader(path); }), "") << name << " " << n;
    }
    std::ofstream(path / name, std::ios::binary) << original;
  }
  EXPECT_EQ(ErrorOf([&] { CheckpointReader(path).VerifyAll(); }), "");
}

// A manifest whose checksum holds, but whose boxes or files do not make sense.
TEST(CheckpointManifest, RefusesWhatDoesNotFit) {
  const auto error_with = [](const std::vector<Box>& boxes, const std::string& file) {
    Manifest manifest;
    manifest.file_bytes["f"] = 8;
    ManifestTensor& tensor = manifest.tensors["t"];
    tensor.shape = {5};
    for (const Box& box : boxes) tensor.boxes.push_back({box, file, "t", 1});
    return ErrorOf([&] { ParseManifest(ToJson(manifest), "dir/manifest.json"); });
  };
  EXPECT_EQ(error_with({{{0}, {5}}}, "f"), "");
  EXPECT_THAT(error_with({{{0}, {2}}, {{2}, {2}}}, "f"),
              AllOf(HasSubstr("bad input"), HasSubstr("dir/manifest.json"), HasSubstr("'t'"),
                    HasSubstr("the first at [4]")));
  EXPECT_THAT(error_with({{{0}, {3}}, {{2}, {3}}}, "f"), HasSubstr("overlap"));
  EXPECT_THAT(error_with({{{0, 0}, {5, 1}}}, "f"), HasSubstr("outside"));
  EXPECT_THAT(error_with({{{0}, {5}}}, "../f"), HasSubstr("does not list"));
  EXPECT_THAT(ErrorOf([] { ParseManifest("{}", "m"); }), HasSubstr("not the manifest"));
  EXPECT_THAT(ErrorOf([] { ParseManifest(R"({"format":"cistron-checkpoint","version":2})", "m"); }),
              AllOf(HasSubstr("unsupported"), HasSubstr("version 2")));
  EXPECT_THAT(ErrorOf([] { ParseManifest(R"({"format":"cistron-checkpoint","version":1})", "m"); }),
              HasSubstr("checksum"));
}

TEST_F(Checkpoint, NewestGoodSkipsDamage) {
  EXPECT_FALSE(NewestGoodCheckpoint(root_));
  EXPECT_TRUE(ListCheckpoints(root_).empty());
  PruneCheckpoints(root_, 1);
  for (const int step : {1, 2, 10, 100'000'000}) SaveStep(root_, step);
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-100000000");
  FlipByte(root_ / "step-100000000/rank-00000.safetensors", 300);
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-00000010");
  fs::remove(root_ / "step-00000010/manifest.json");
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-00000002");
  fs::resize_file(root_ / "step-00000002/rank-00000.safetensors", 20);
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-00000001");
  // Other things in the folder are none of our business.
  std::ofstream(root_ / "step-00000200") << "a file";
  fs::create_directory(root_ / "step-7");
  fs::create_directory(root_ / "step-00000300.bak");
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-00000001");
}

TEST_F(Checkpoint, PruningKeepsTheNewestGood) {
  for (int step = 1; step <= 5; ++step) SaveStep(root_, step);
  FlipByte(root_ / "step-00000005/rank-00000.safetensors", 300);
  FlipByte(root_ / "step-00000003/rank-00000.safetensors", 300);
  PruneCheckpoints(root_, 1);
  // 5 is damaged and newer than any good one, 4 is the newest good one.
  ASSERT_TRUE(NewestGoodCheckpoint(root_));
  EXPECT_EQ(NewestGoodCheckpoint(root_)->filename(), "step-00000004");
  EXPECT_FALSE(fs::exists(root_ / "step-00000003"));
  EXPECT_TRUE(fs::exists(root_ / "step-00000005"));
  SaveStep(root_, 6);
  SaveStep(root_, 7);
  PruneCheckpoints(root_, 2);
  EXPECT_THAT(ListCheckpoints(root_),
              ElementsAre(root_ / "step-00000006", root_ / "step-00000007"));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 2);
  EXPECT_THROW(PruneCheckpoints(root_, 0), Error);
}

TEST_F(Checkpoint, StaleTemporariesGoAndLivingOnesStay) {
  SaveStep(root_, 1);
  fs::create_directories(root_ / ".cistron-tmp-step-00000002-1-0/deep");
  std::ofstream(root_ / ".cistron-tmp-file-1-0") << "half";
  AtomicDirectory living(root_ / "step-00000003");
  PruneCheckpoints(root_, 1);
  EXPECT_TRUE(fs::exists(living.path()));
  EXPECT_FALSE(fs::exists(root_ / ".cistron-tmp-step-00000002-1-0"));
  EXPECT_FALSE(fs::exists(root_ / ".cistron-tmp-file-1-0"));
}

TEST_F(Checkpoint, PlacesThatCannotBeWritten) {
  std::ofstream(root_.string()) << "a file where the folder should be";
  EXPECT_THAT(ErrorOf([&] { SaveStep(root_, 1); }),
              AllOf(HasSubstr("input/output error"), HasSubstr(root_.string())));
  EXPECT_THAT(ErrorOf([&] { SaveStep("/proc/nowhere", 1); }), HasSubstr("input/output error"));
}

}  // namespace
}  // namespace cistron::io
