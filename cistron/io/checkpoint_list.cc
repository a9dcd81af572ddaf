// The checkpoints of a run: which are there, which are good, which may go.
#include <algorithm>
#include <charconv>
#include <exception>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/file.h"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;

// The step in a name "step-NNNNNNNN"; nothing for any other name.
std::optional<std::int64_t> StepOf(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  std::int64_t step = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || stop != end || name != fmt::format("step-{:08}", step)) {
    return std::nullopt;
  }
  return step;
}

// All directories with a checkpoint's name, oldest first, sound or not.
std::vector<fs::path> Candidates(const fs::path& root) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::optional<std::int64_t> step = StepOf(it->path().filename().string());
    if (step && it->is_directory(error)) found.emplace_back(*step, it->path());
  }
  if (error && fs::exists(root)) {
    CISTRON_THROW(kIo, "{}: cannot list: {}", root.string(), error.message());
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  paths.reserve(found.size());
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

// Whether a checkpoint can be loaded: its manifest and files agree and, when asked, all checksums
// hold.
bool IsGood(const fs::path& path, bool verify) {
  try {
    const CheckpointReader reader(path);
    if (verify) reader.VerifyAll();
    return true;
  } catch (const std::exception& e) {
    LogWarning("{}: not a complete checkpoint, left aside: {}", path.string(), e.what());
    return false;
  }
}

}  // namespace

std::vector<fs::path> ListCheckpoints(const fs::path& root) {
  std::vector<fs::path> paths = Candidates(root);
  std::erase_if(paths, [](const fs::path& path) { return !IsGood(path, /*verify=*/false); });
  return paths;
}

std::optional<fs::path> NewestGoodCheckpoint(const fs::path& root) {
  const std::vector<fs::path> paths = Candidates(root);
  for (auto it = paths.rbegin(); it != paths.rend(); ++it) {
    if (IsGood(*it, /*verify=*/true)) return *it;
  }
  return std::nullopt;
}

bool HasCheckpointDirectories(const fs::path& root) {
  return !Candidates(root).empty();
}

void PruneCheckpoints(const fs::path& root, std::int64_t keep) {
  CISTRON_CHECK(keep >= 1, "PruneCheckpoints: keep is {}; at least one must stay", keep);
  RemoveStaleTemporaries(root);
  // Only what is older than `keep` checkpoints that were read back in full may go; a damaged one
  // counts for nothing and goes with those of its age.
  std::int64_t good = 0;
  const std::vector<fs::path> paths = Candidates(root);
  for (auto it = paths.rbegin(); it != paths.rend(); ++it) {
    if (good >= keep) {
      RemoveDirectoryAtomically(*it);
    } else if (IsGood(*it, /*verify=*/true)) {
      ++good;
    }
  }
}

}  // namespace cistron::io
