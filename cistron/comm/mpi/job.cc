// Messages are tested for and not waited for: MPI's own waits spin, and know no limit.
#include "cistron/comm/mpi/job.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <mpi.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "cistron/base/env.h"
#include "cistron/base/error.h"

namespace cistron::comm::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kNoticeTag = 0;
constexpr std::size_t kLongestNotice = 2000;
constexpr milliseconds kNoticeEvery{5};
// Ranks whose watchdogs fire together hear of each other within this time.
constexpr milliseconds kSettle{200};
// What a rank that keeps silent leaves to the one that speaks, before it ends the run itself.
constexpr milliseconds kSilence{5000};
// Within which a launcher ends the other ranks of one that has spoken and left.
constexpr milliseconds kBetweenSpeakers{2000};

// Asks again at once for some microseconds, then sleeps an eighth of what it has waited: the
// processor belongs to ranks that compute, and an answer comes later by an eighth at most. No
// yielding: on a busy processor that costs a time slice, where a sleeper is preferred.
void Rest(Clock::duration waited) {
  if (waited < microseconds(50)) return;
  // A message takes several steps of both sides: each would cost the 50 µs by which Linux may be
  // late, and may not any more in this thread.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  std::this_thread::sleep_for(
      std::clamp<Clock::duration>(waited / 8, microseconds(10), microseconds(200)));
}

// Around a call of MPI that waits for every rank and knows no limit: where it has not returned in
// time, this process ends with a message, and mpirun or srun ends the others.
class Deadline {
 public:
  // `rank` of several that wait: the lowest speaks, and the others are ended before they do.
  Deadline(const char* call, const RunOptions& options, int rank)
      : thread_([this, call, &options, rank] { Watch(call, options, rank); }) {}
  ~Deadline() {
    {
      const std::lock_guard lock(mutex_);
      returned_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void Watch(const char* call, const RunOptions& options, int rank) {
    const auto limit = std::max(options.start_limit, options.communicator.limit);
    auto end = Clock::now() + limit + std::min(rank, 3) * kBetweenSpeakers;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (changed_.wait_until(lock, end, [this] { return returned_; })) return;
      if (Clock::now() - end < kBetweenSpeakers / 2) break;
      end = Clock::now() + kSilence;  // this process was stopped itself, and others have spoken
    }
    const Error error(
        ErrorCode::kIo,
        fmt::format(
            "mpi: rank {} waited {:.1f} s in {} for other ranks, which have not come so far", rank,
            std::chrono::duration<double>(limit).count(), call));
    const std::string line = "error: " + error.message() + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
    std::_Exit(options.status_of ? options.status_of(error) : 1);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool returned_ = false;
  std::thread thread_;
};

// Before MPI knows it; 0 where the launcher does not say.
int RankOfLauncher() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (const auto text = GetEnv(variable)) return std::max(std::atoi(text->c_str()), 0);
  }
  return 0;
}

void Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  CISTRON_THROW(kIo, "mpi: {} failed: {}", call,
                std::string_view(text.data(), static_cast<std::size_t>(length)));
}

}  // namespace

struct Job::State {
  explicit State(const RunOptions& run_options) : options(run_options) {}

  // A message that left a copy here until it is gone.
  struct Sent {
    std::vector<std::byte> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  // Those below are called under the lock.
  void SendCopy(int to, int tag, const std::byte* data, std::int64_t bytes);
  void FreeSent();
  bool ReadNotice();
  [[noreturn]] void ThrowEnded() const;

  // Calls `done` under the lock until it is true, resting between. False after the limit. Throws
  // where the run has ended.
  bool Poll(const std::function<bool()>& done);

  // Pieces that MPI can count: calls f(offset, bytes); an empty message is one empty piece.
  template <class F>
  void Cut(std::int64_t bytes, F f) const {
    std::int64_t offset = 0;
    do {
      const std::int64_t piece = std::min(bytes - offset, options.largest_message);
      f(offset, static_cast<int>(piece));
      offset += piece;
    } while (offset < bytes);
  }

  const RunOptions options;
  int rank = 0, size = 1, largest_tag = 0;
  MPI_Comm comm = MPI_COMM_NULL;

  std::mutex mutex;  // around every call of MPI
  std::list<Sent> sent;
  bool ended = false;  // by this rank or by another
  int ended_by = -1;
  std::string ended_message;
};

void Job::State::SendCopy(int to, int tag, const std::byte* data, std::int64_t bytes) {
  Sent& copy = sent.emplace_back();
  copy.bytes.assign(data, data + bytes);
  Check(
      MPI_Isend(copy.bytes.data(), static_cast<int>(bytes), MPI_BYTE, to, tag, comm, &copy.request),
      "MPI_Isend");
}

void Job::State::FreeSent() {
  for (auto it = sent.begin(); it != sent.end();) {
    int gone = 0;
    Check(MPI_Test(&it->request, &gone, MPI_STATUS_IGNORE), "MPI_Test");
    it = gone != 0 ? sent.erase(it) : std::next(it);
  }
}

// Whether another rank has told that it ends the run. Of several, the lowest counts.
bool Job::State::ReadNotice() {
  int waiting = 0;
  MPI_Status status;
  Check(MPI_Iprobe(MPI_ANY_SOURCE, kNoticeTag, comm, &waiting, &status), "MPI_Iprobe");
  if (waiting == 0) return false;
  int length = 0;
  Check(MPI_Get_count(&status, MPI_BYTE, &length), "MPI_Get_count");
  std::string message(static_cast<std::size_t>(length), '\0');
  Check(MPI_Recv(message.data(), length, MPI_BYTE, status.MPI_SOURCE, kNoticeTag, comm,
                 MPI_STATUS_IGNORE),
        "MPI_Recv");
  if (!ended || status.MPI_SOURCE < ended_by) {
    ended = true;
    ended_by = status.MPI_SOURCE;
    ended_message = std::move(message);
  }
  return true;
}

void Job::State::ThrowEnded() const {
  throw Error(ErrorCode::kIo, fmt::format("comm: ended by rank {}: {}", ended_by, ended_message));
}

bool Job::State::Poll(const std::function<bool()>& done) {
  const auto begin = Clock::now();
  auto waited = Clock::duration::zero(), noticed = waited;
  for (;;) {
    {
      std::lock_guard lock(mutex);
      if (ended) ThrowEnded();
      if (done()) return true;
      FreeSent();
      if (waited - noticed >= kNoticeEvery) {  // each question costs microseconds
        if (ReadNotice()) ThrowEnded();
        noticed = waited;
      }
    }
    waited = Clock::now() - begin;
    if (waited >= options.communicator.limit) return false;
    Rest(waited);
  }
}

Job::Job(const RunOptions& options) : state_(std::make_unique<State>(options)) {
  int initialized = 0;
  Check(MPI_Initialized(&initialized), "MPI_Initialized");
  CISTRON_CHECK(initialized == 0, "mpi: RunRank may be called once in a process");
  int provided = 0;
  {
    const Deadline deadline("MPI_Init", options, RankOfLauncher());
    Check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  }
  if (provided < MPI_THREAD_SERIALIZED) {
    MPI_Finalize();
    CISTRON_THROW(kUnsupported,
                  "mpi: this library gives thread level {}, below MPI_THREAD_SERIALIZED; use an "
                  "Open MPI with support of threads",
                  provided);
  }
  State& s = *state_;
  {
    const Deadline deadline("MPI_Comm_dup", options, RankOfLauncher());
    Check(MPI_Comm_dup(MPI_COMM_WORLD, &s.comm), "MPI_Comm_dup");
  }
  Check(MPI_Comm_set_errhandler(s.comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  Check(MPI_Comm_rank(s.comm, &s.rank), "MPI_Comm_rank");
  Check(MPI_Comm_size(s.comm, &s.size), "MPI_Comm_size");
  void* tag = nullptr;
  int found = 0;
  Check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &tag, &found), "MPI_Comm_get_attr");
  s.largest_tag = found != 0 ? *static_cast<int*>(tag) : 32767;  // what the standard promises
}

Job::~Job() = default;

int Job::rank() const {
  return state_->rank;
}
int Job::size() const {
  return state_->size;
}
int Job::largest_tag() const {
  return state_->largest_tag;
}

void Job::Exchange(int tag, std::span<const ConstMessage> sends,
                   std::span<const Message> receives) {
  State& s = *state_;
  struct Piece {
    int peer = 0;
    int expected = -1;  // bytes of a receive; −1: a send
  };
  std::vector<Piece> pieces;
  std::vector<MPI_Request> requests;
  {
    std::lock_guard lock(s.mutex);
    if (s.ended) s.ThrowEnded();
    for (const Message& m : receives) {
      s.Cut(m.bytes, [&](std::int64_t offset, int bytes) {
        pieces.push_back({m.peer, bytes});
        Check(MPI_Irecv(m.data + offset, bytes, MPI_BYTE, m.peer, tag, s.comm,
                        &requests.emplace_back()),
              "MPI_Irecv");
      });
    }
    for (const ConstMessage& m : sends) {
      s.Cut(m.bytes, [&](std::int64_t offset, int bytes) {
        pieces.push_back({m.peer});
        Check(MPI_Isend(m.data + offset, bytes, MPI_BYTE, m.peer, tag, s.comm,
                        &requests.emplace_back()),
              "MPI_Isend");
      });
    }
  }
  std::vector<int> indices(requests.size());
  std::vector<MPI_Status> statuses(requests.size());
  // What has arrived, whether it is what was expected.
  const auto check = [&](const Piece& piece, const MPI_Status& status, bool failed) {
    if (failed && status.MPI_ERROR == MPI_ERR_TRUNCATE) {
      throw TransportFailure{
          fmt::format("rank {} sent more than the {} bytes that this rank expects", piece.peer,
                      piece.expected)};
    }
    if (failed) Check(status.MPI_ERROR, "a message");
    if (piece.expected < 0) return;
    int bytes = 0;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    if (bytes != piece.expected) {
      throw TransportFailure{fmt::format("rank {} sent {} bytes where this rank expects {}",
                                         piece.peer, bytes, piece.expected)};
    }
  };
  std::size_t open = requests.size();
  const bool done = s.Poll([&] {
    if (open == 0) return true;
    int count = 0;
    const int code = MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count,
                                  indices.data(), statuses.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) Check(code, "MPI_Testsome");
    for (std::size_t i = 0; i < static_cast<std::size_t>(std::max(count, 0)); ++i) {
      check(pieces[static_cast<std::size_t>(indices[i])], statuses[i], code != MPI_SUCCESS);
      --open;
    }
    return open == 0;
  });
  if (done) return;
  std::set<int> late;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (requests[i] != MPI_REQUEST_NULL) late.insert(pieces[i].peer);
  }
  const double seconds = std::chrono::duration<double>(s.options.communicator.limit).count();
  throw TransportFailure{fmt::format("waited {:.1f} s for rank{} {}", seconds,
                                     late.size() == 1 ? "" : "s", fmt::join(late, ", "))};
}

void Job::Post(int tag, const ConstMessage& message) {
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  if (s.ended) s.ThrowEnded();
  s.FreeSent();
  s.Cut(message.bytes, [&](std::int64_t offset, int bytes) {
    s.SendCopy(message.peer, tag, message.data + offset, bytes);
  });
}

void Job::EndOthers(const std::string& message) noexcept {
  State& s = *state_;
  try {
    std::unique_lock lock(s.mutex);
    if (s.ended) return;
    s.ended = true;
    s.ended_by = s.rank;
    s.ended_message = message;
    const std::string notice = message.substr(0, kLongestNotice);
    for (int r = 0; r < s.size; ++r) {
      if (r == s.rank) continue;
      s.SendCopy(r, kNoticeTag, reinterpret_cast<const std::byte*>(notice.data()),
                 static_cast<std::int64_t>(notice.size()));
    }
    // Here, where the buffers of what was under way still exist: MPI may write into them as long as
    // it is called.
    const auto settled = Clock::now() + kSettle;
    while (Clock::now() < settled) {
      s.FreeSent();
      while (s.ReadNotice()) {
      }
      lock.unlock();
      std::this_thread::sleep_for(milliseconds(5));
      lock.lock();
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: rank %d could not tell the others: %s\n", s.rank, e.what());
  }
}

void Job::Abort(const std::string& message, int status) noexcept {
  EndOthers(message);
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  if (s.ended_by == s.rank) {
    const std::string line = "error: " + message + "\n";  // one write: lines of ranks do not mix
    std::fflush(stdout);
    std::fwrite(line.data(), 1, line.size(), stderr);
    std::fflush(stderr);
  } else {
    lock.unlock();
    std::this_thread::sleep_for(kSilence);  // the one that speaks ends this process, too
    lock.lock();
  }
  MPI_Abort(MPI_COMM_WORLD, status);
  std::_Exit(status);
}

void Job::Finish() {
  State& s = *state_;
  const bool gone = s.Poll([&] {
    s.FreeSent();
    return s.sent.empty();
  });
  std::lock_guard lock(s.mutex);
  if (!gone) {
    CISTRON_THROW(kIo, "mpi: rank {} ends with {} messages that nobody received", s.rank,
                  s.sent.size());
  }
  Check(MPI_Comm_free(&s.comm), "MPI_Comm_free");
  const Deadline deadline("MPI_Finalize", s.options, s.rank);
  Check(MPI_Finalize(), "MPI_Finalize");
}

}  // namespace cistron::comm::mpi
