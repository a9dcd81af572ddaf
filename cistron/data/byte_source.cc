#include "cistron/data/byte_source.h"

#include <fcntl.h>
#include <htslib/bgzf.h>
#include <htslib/hts_log.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/data/decode_cache.h"

namespace cistron::data {
namespace {

constexpr std::int64_t kScanBytes = 1 << 20;

[[noreturn]] void ThrowCannotOpen(const std::filesystem::path& path) {
  const int reason = errno;
  CISTRON_THROW(kIo, "{}: cannot open: {}{}", path.string(), std::strerror(reason),
                reason == EMFILE ? "; raise the limit (ulimit -n), or join the files" : "");
}

class PlainSource final : public ByteSource {
 public:
  explicit PlainSource(std::filesystem::path path)
      : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) ThrowCannotOpen(path_);
  }
  ~PlainSource() override { ::close(fd_); }

  void Scan(const std::function<void(std::string_view)>& chunk) override {
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
    std::vector<char> buffer(kScanBytes);
    std::int64_t offset = 0;
    while (const std::int64_t n = Read(offset, buffer.data(), kScanBytes)) {
      chunk({buffer.data(), static_cast<std::size_t>(n)});
      offset += n;
    }
    ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  }

  std::int64_t Read(std::int64_t offset, char* out, std::int64_t n) const override {
    std::int64_t done = 0;
    while (done < n) {
      const ssize_t got =
          ::pread(fd_, out + done, static_cast<std::size_t>(n - done), offset + done);
      if (got < 0) {
        if (errno == EINTR) continue;
        CISTRON_THROW(kIo, "{}: cannot read: {}", path_.string(), std::strerror(errno));
      }
      if (got == 0) break;
      done += got;
    }
    return done;
  }

 private:
  std::filesystem::path path_;
  int fd_;
};

class BgzfSource final : public ByteSource {
 public:
  explicit BgzfSource(std::filesystem::path path)
      : path_(std::move(path)), file_(::bgzf_open(path_.c_str(), "r")) {
    if (!file_) ThrowCannotOpen(path_);
    ::bgzf_set_cache_size(file_, kCacheBytes);
  }
  ~BgzfSource() override { ::bgzf_close(file_); }

  void Scan(const std::function<void(std::string_view)>& chunk) override {
    const std::lock_guard lock(mutex_);
    if (::bgzf_check_EOF(file_) != 1) {
      CISTRON_THROW(kBadInput,
                    "{}: the bgzip end marker is missing: the file is truncated; fetch it again",
                    path_.string());
    }
    std::vector<char> buffer(kSeekBytes);
    starts_.clear();
    for (;;) {
      starts_.push_back(bgzf_tell(file_));
      const std::int64_t n = ReadHere(buffer.data(), kSeekBytes);
      if (n == 0) break;
      chunk({buffer.data(), static_cast<std::size_t>(n)});
    }
  }

  std::int64_t Read(std::int64_t offset, char* out, std::int64_t n) const override {
    const std::lock_guard lock(mutex_);
    const auto block = static_cast<std::size_t>(offset / kSeekBytes);
    if (block >= starts_.size()) return 0;
    if (::bgzf_seek(file_, starts_[block], SEEK_SET) != 0) {
      CISTRON_THROW(kIo, "{}: cannot seek in the bgzip data", path_.string());
    }
    std::vector<char> skipped(static_cast<std::size_t>(offset % kSeekBytes));
    ReadHere(skipped.data(), static_cast<std::int64_t>(skipped.size()));
    return ReadHere(out, n);
  }

 private:
  // Decoded bytes between two remembered virtual offsets.
  static constexpr std::int64_t kSeekBytes = 1 << 16;
  // Decoded blocks that stay in memory: all of a bacterium.
  static constexpr int kCacheBytes = 8 << 20;

  std::int64_t ReadHere(char* out, std::int64_t n) const {
    const ssize_t got = ::bgzf_read(file_, out, static_cast<std::size_t>(n));
    if (got < 0) {
      CISTRON_THROW(kBadInput, "{}: the bgzip data are damaged or truncated; fetch the file again",
                    path_.string());
    }
    return got;
  }

  std::filesystem::path path_;
  mutable std::mutex mutex_;  // one handle, one position
  BGZF* file_;
  std::vector<std::int64_t> starts_;
};

class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string bytes, std::int64_t chunk) : bytes_(std::move(bytes)), chunk_(chunk) {}
  void Scan(const std::function<void(std::string_view)>& chunk) override {
    const std::string_view all = bytes_;
    for (std::size_t at = 0; at < all.size(); at += static_cast<std::size_t>(chunk_)) {
      chunk(all.substr(at, static_cast<std::size_t>(chunk_)));
    }
  }
  std::int64_t Read(std::int64_t offset, char* out, std::int64_t n) const override {
    const std::int64_t size = static_cast<std::int64_t>(bytes_.size());
    const std::int64_t got = std::clamp<std::int64_t>(size - offset, 0, n);
    std::memcpy(out, bytes_.data() + std::min(offset, size), static_cast<std::size_t>(got));
    return got;
  }

 private:
  std::string bytes_;
  std::int64_t chunk_;
};

bool StartsWith(std::string_view bytes, std::string_view magic) {
  return bytes.starts_with(magic);
}

// RFC 1952 with the extra subfield "BC" that marks a BGZF block.
bool IsBgzf(std::string_view head) {
  return head.size() >= 18 && (head[3] & 4) != 0 && head[12] == 'B' && head[13] == 'C';
}

}  // namespace

std::unique_ptr<ByteSource> MemoryByteSource(std::string bytes, std::int64_t chunk) {
  return std::make_unique<MemorySource>(std::move(bytes), chunk);
}

std::unique_ptr<ByteSource> internal::PlainByteSource(const std::filesystem::path& path) {
  return std::make_unique<PlainSource>(path);
}

std::unique_ptr<ByteSource> OpenByteSource(const std::filesystem::path& path,
                                           const DecodeCacheOptions& cache) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      CISTRON_THROW(kNotFound, "{}: no such file; check the path", path.string());
    }
    CISTRON_THROW(kIo, "{}: {}", path.string(), std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) {
    CISTRON_THROW(kBadInput, "{}: is not a regular file; give the path of a sequence file",
                  path.string());
  }
  if (info.st_size == 0) CISTRON_THROW(kBadInput, "{}: the file is empty", path.string());
  auto plain = internal::PlainByteSource(path);
  char bytes[18];
  const std::int64_t n = plain->Read(0, bytes, sizeof(bytes));
  const std::string_view head(bytes, static_cast<std::size_t>(n));
  if (StartsWith(head, "\x1f\x8b")) {
    // htslib's own messages would repeat ours without the remedy.
    ::hts_set_log_level(HTS_LOG_OFF);
    if (IsBgzf(head)) return std::make_unique<BgzfSource>(path);
    return internal::PlainByteSource(DecodedCopy(path, cache));
  }
  for (const auto& [magic, name] : {std::pair<std::string_view, std::string_view>{"\xfd"
                                                                                  "7zXZ",
                                                                                  "xz"},
                                    {"BZh", "bzip2"},
                                    {"\x28\xb5\x2f\xfd", "zstd"},
                                    {"PK\x03\x04", "zip"}}) {
    if (StartsWith(head, magic)) {
      CISTRON_THROW(kBadInput, "{}: is compressed with {}; unpack it, or use gzip or bgzip",
                    path.string(), name);
    }
  }
  return plain;
}

}  // namespace cistron::data
