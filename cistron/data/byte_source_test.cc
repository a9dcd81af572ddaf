// Compression, damage, and the cache of decoded files.
#include "cistron/data/byte_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <htslib/bgzf.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/data/decode_cache.h"
#include "cistron/data/test_files.h"

namespace cistron::data {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string RandomText(std::size_t n) {
  const RandomStream random(99, "byte source test");
  std::string text;
  for (std::size_t i = 0; i < n; ++i) text += "ACGT\n"[random.Below(i, 5)];
  return text;
}

std::string Everything(ByteSource& source) {
  std::string all;
  source.Scan([&](std::string_view chunk) { all += chunk; });
  return all;
}

void ExpectReads(const fs::path& path, const std::string& text, const DecodeCacheOptions& cache) {
  const auto source = OpenByteSource(path, cache);
  ASSERT_EQ(Everything(*source), text);
  const auto size = static_cast<std::int64_t>(text.size());
  for (const std::int64_t offset : {std::int64_t{0}, std::int64_t{1}, size / 3, size - 7, size}) {
    for (const std::int64_t n : {0, 1, 100, 70000}) {
      std::string got(static_cast<std::size_t>(n), 'x');
      const std::int64_t read = source->Read(offset, got.data(), n);
      ASSERT_EQ(read, std::min(n, size - offset));
      ASSERT_EQ(got.substr(0, static_cast<std::size_t>(read)),
                text.substr(static_cast<std::size_t>(offset), static_cast<std::size_t>(read)));
    }
  }
}

void WriteBgzip(const fs::path& path, const std::string& text) {
  BGZF* file = bgzf_open(path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(bgzf_write(file, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ASSERT_EQ(bgzf_close(file), 0);
}

std::string Content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(ByteSource, PlainGzipAndBgzipReadTheSame) {
  const TemporaryDirectory scratch;
  const DecodeCacheOptions cache{scratch.path() / "cache"};
  const std::string text = RandomText(300000);
  ExpectReads(scratch.Write("plain.fa", text), text, cache);
  ExpectReads(scratch.Write("one.fa.gz", Gzip(text)), text, cache);
  // Members one after another, and zeros at the end.
  ExpectReads(scratch.Write("two.fa.gz", Gzip(text.substr(0, 1000)) + Gzip("") +
                                             Gzip(text.substr(1000)) + std::string(600, '\0')),
              text, cache);
  WriteBgzip(scratch.path() / "b.fa.gz", text);
  ExpectReads(scratch.path() / "b.fa.gz", text, cache);
}

TEST(ByteSource, ManyThreadsReadOneBgzipFile) {
  const TemporaryDirectory scratch;
  const std::string text = RandomText(300000);
  WriteBgzip(scratch.path() / "b.fa.gz", text);
  const auto source = OpenByteSource(scratch.path() / "b.fa.gz", {});
  Everything(*source);
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < 50; ++i) {
        const std::size_t offset = (i * 7919 + t * 31337) % 290000;
        char got[1000];
        wrong[t] += source->Read(static_cast<std::int64_t>(offset), got, 1000) != 1000 ||
                    text.compare(offset, 1000, got, 1000) != 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(ByteSource, BadFilesAreNamed) {
  const TemporaryDirectory scratch;
  const DecodeCacheOptions cache{scratch.path() / "cache"};
  const auto open = [&](const fs::path& path) { Everything(*OpenByteSource(path, cache)); };
  EXPECT_THAT(MessageOf([&] { open(scratch.path() / "no.fa"); }, ErrorCode::kNotFound),
              AllOf(HasSubstr("no.fa"), HasSubstr("no such file")));
  EXPECT_THAT(MessageOf([&] { open(scratch.Write("empty.fa", "")); }), HasSubstr("is empty"));
  EXPECT_THAT(MessageOf([&] { open(scratch.path()); }), HasSubstr("not a regular file"));
  EXPECT_THAT(MessageOf([&] { open(scratch.Write("x.zst", "\x28\xb5\x2f\xfd...")); }),
              HasSubstr("zstd"));
}

// Every truncation of a gzip file, and of a bgzip file, is noticed and leaves nothing in the cache.
TEST(ByteSource, TruncatedGzip) {
  const TemporaryDirectory scratch;
  const DecodeCacheOptions cache{scratch.path() / "cache"};
  const std::string gzip = Gzip(RandomText(3000));
  for (std::size_t n = 3; n < gzip.size(); n += n < 40 ? 1 : 37) {
    const fs::path path = scratch.Write("cut.fa.gz", gzip.substr(0, n));
    EXPECT_THAT(MessageOf([&] { Everything(*OpenByteSource(path, cache)); }),
                AllOf(HasSubstr("cut.fa.gz"), HasSubstr("truncated")))
        << n;
  }
  EXPECT_TRUE(fs::is_empty(cache.directory));
  WriteBgzip(scratch.path() / "b.fa.gz", RandomText(200000));
  const std::string bgzip = Content(scratch.path() / "b.fa.gz");
  for (const std::size_t n : {bgzip.size() - 1, bgzip.size() - 28, bgzip.size() / 2}) {
    const fs::path path = scratch.Write("cutb.fa.gz", bgzip.substr(0, n));
    EXPECT_THAT(MessageOf([&] { Everything(*OpenByteSource(path, cache)); }),
                HasSubstr("truncated"))
        << n;
  }
}

TEST(ByteSource, DamagedGzip) {
  const TemporaryDirectory scratch;
  const DecodeCacheOptions cache{scratch.path() / "cache"};
  std::string gzip = Gzip(RandomText(3000));
  gzip[gzip.size() - 6] = static_cast<char>(gzip[gzip.size() - 6] ^ 1);  // the checksum
  const fs::path path = scratch.Write("bad.fa.gz", gzip);
  EXPECT_THAT(MessageOf([&] { OpenByteSource(path, cache); }), HasSubstr("damaged"));
}

TEST(DecodeCache, ReusesPrunesAndRefuses) {
  const TemporaryDirectory scratch;
  DecodeCacheOptions cache{scratch.path() / "cache", 25000};
  const std::string text = RandomText(10000);
  const fs::path a = scratch.Write("a.fa.gz", Gzip(text));
  const fs::path first = DecodedCopy(a, cache);
  EXPECT_EQ(Content(first), text);
  const auto made = fs::last_write_time(first);
  fs::last_write_time(first, made - std::chrono::hours(5));
  EXPECT_EQ(DecodedCopy(a, cache), first);
  EXPECT_GT(fs::last_write_time(first), made - std::chrono::hours(1));  // a use renews it

  // Other content, another entry; the one used longest ago goes beyond the limit.
  const fs::path b = DecodedCopy(scratch.Write("b.fa.gz", Gzip(RandomText(9000))), cache);
  fs::last_write_time(b, made - std::chrono::hours(2));
  scratch.Write("cache/old.decoded.decoding-1-2", "left by a crash");
  fs::last_write_time(scratch.path() / "cache/old.decoded.decoding-1-2",
                      made - std::chrono::hours(100));
  const fs::path c = DecodedCopy(scratch.Write("c.fa.gz", Gzip(RandomText(8000))), cache);
  EXPECT_TRUE(fs::exists(first));
  EXPECT_FALSE(fs::exists(b));
  EXPECT_TRUE(fs::exists(c));
  EXPECT_FALSE(fs::exists(scratch.path() / "cache/old.decoded.decoding-1-2"));

  cache.limit_bytes = 5000;
  const fs::path d = scratch.Write("d.fa.gz", Gzip(RandomText(7000)));
  EXPECT_THAT(MessageOf([&] { DecodedCopy(d, cache); }, ErrorCode::kIo),
              AllOf(HasSubstr("data.cache_limit_bytes = 5000"), HasSubstr("bgzip")));
}

// A file that is written anew, with as many bytes and the same first ones, is another.
TEST(DecodeCache, KnowsAFileByItsModificationTime) {
  const TemporaryDirectory scratch;
  const DecodeCacheOptions cache{scratch.path() / "cache"};
  const fs::path a = scratch.Write("a.fa.gz", Gzip("ACGT"));
  const fs::path first = DecodedCopy(a, cache);
  EXPECT_EQ(DecodedCopy(a, cache), first);
  fs::last_write_time(a, fs::last_write_time(a) + std::chrono::nanoseconds(1000));
  EXPECT_NE(DecodedCopy(a, cache), first);
}

TEST(DecodeCache, UnwritableDirectory) {
  const TemporaryDirectory scratch;
  const fs::path file = scratch.Write("file", "x");
  const fs::path a = scratch.Write("a.fa.gz", Gzip("ACGT"));
  EXPECT_THAT(MessageOf([&] { DecodedCopy(a, {file / "cache"}); }, ErrorCode::kIo),
              HasSubstr("data.cache_dir"));
}

}  // namespace
}  // namespace cistron::data
