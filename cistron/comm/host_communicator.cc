#include "cistron/comm/host_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/comm/reduce.h"

namespace cistron::comm {
namespace {

// What a reduction receives before it adds: small enough to be in the cache when it does.
constexpr std::int64_t kScratchBytes = std::int64_t{4} << 20;

std::byte* Bytes(const Tensor& t) {
  return static_cast<std::byte*>(t.raw());
}

std::int64_t ElementBytes(const Operation& op) {
  return static_cast<std::int64_t>(SizeOf(op.signature.dtype));
}

// What ranks tell each other before a collective.
struct Header {
  Signature signature;
  std::int64_t sequence = 0;
  std::int64_t to = 0, from = 0;  // counts of the pair
};
static_assert(std::is_trivially_copyable_v<Header>);

template <class T>
const std::byte* BytesOf(const T& value) {
  return reinterpret_cast<const std::byte*>(&value);
}

}  // namespace

HostCommunicator::HostCommunicator(std::unique_ptr<Transport> transport, const Options& options,
                                   std::string name)
    : options_(options), name_(std::move(name)), transport_(std::move(transport)) {}

void HostCommunicator::Run(Operation operation) {
  queue_.Drain();
  Execute(operation);
}

Work HostCommunicator::Start(Operation operation) {
  return queue_.Push([this, op = std::move(operation)] { Execute(op); });
}

std::unique_ptr<Communicator> HostCommunicator::Split(int color, int key, std::string name) {
  const int n = size();
  Tensor own = Tensor::Empty({3}, DType::kI64);
  Tensor all = Tensor::Empty({n, 3}, DType::kI64);
  const std::array<std::int64_t, 3> values{color, key, *next_context_};
  std::copy(values.begin(), values.end(), own.data<std::int64_t>());
  Communicator::AllGather(own, all);

  // Contexts that no member has used: the same numbers on every rank of this communicator.
  std::int64_t context = 0;
  std::set<std::int64_t> colors;
  std::vector<std::tuple<std::int64_t, int>> members;  // (key, rank)
  const std::int64_t* row = all.data<std::int64_t>();
  for (int r = 0; r < n; ++r, row += 3) {
    context = std::max(context, row[2]);
    if (row[0] >= 0) colors.insert(row[0]);
    if (row[0] == color) members.emplace_back(row[1], r);
  }
  *next_context_ = context + static_cast<std::int64_t>(colors.size());
  if (color < 0) return nullptr;
  context += std::distance(colors.begin(), colors.find(color));
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  ranks.reserve(members.size());
  for (const auto& member : members) ranks.push_back(std::get<1>(member));

  if (name.empty()) name = fmt::format("{}/{}", name_, color);
  auto child = std::make_unique<HostCommunicator>(transport_->Subgroup(ranks, context), options_,
                                                  std::move(name));
  child->next_context_ = next_context_;
  return child;
}

void HostCommunicator::Execute(const Operation& op) {
  if (broken_) throw Error(*broken_);
  for (const Tensor* t : {&op.input, &op.output}) {
    if (!*t || OnHost(*t)) continue;
    CISTRON_THROW(kUnsupported,
                  "{}: {} is on {}; transport {} moves host memory. Copy it with ToHost()",
                  Name(op.signature.kind), Describe(*t), ToString(t->device()), transport());
  }
  const bool collective = IsCollective(op.signature.kind);
  if (collective) ++sequence_;
  try {
    if (size() > 1 && collective && options_.checked) CheckSameOperation(op);
    Carry(op);
  } catch (const TransportFailure& failure) {
    Fail(op, failure.what);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) broken_ = error;
    throw;
  }
  last_finished_ = collective ? fmt::format("operation {}, {}", sequence_, Describe(op.signature))
                              : Describe(op.signature);
}

void HostCommunicator::Fail(const Operation& op, const std::string& what) {
  std::string place =
      IsCollective(op.signature.kind) ? fmt::format("operation {}", sequence_) : "point to point";
  place += fmt::format(" of '{}'", name_);
  broken_ = Error(ErrorCode::kIo, fmt::format("comm: rank {}: {} ({}): {}; finished last: {}",
                                              transport_->WorldRank(rank()), Describe(op.signature),
                                              place, what, last_finished_));
  transport_->EndOthers(broken_->message());
  throw Error(*broken_);
}

void HostCommunicator::CheckSameOperation(const Operation& op) {
  const std::size_t n = static_cast<std::size_t>(size());
  std::vector<Header> own(n), theirs(n);
  std::vector<ConstMessage> sends;
  std::vector<Message> receives;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const std::size_t i = static_cast<std::size_t>(r);
    own[i] = {op.signature, sequence_, op.to.empty() ? 0 : op.to[i],
              op.from.empty() ? 0 : op.from[i]};
    sends.push_back({r, BytesOf(own[i]), sizeof(Header)});
    receives.push_back({r, reinterpret_cast<std::byte*>(&theirs[i]), sizeof(Header)});
  }
  transport_->Exchange(Channel::kCollective, sends, receives);
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    const Header& mine = own[static_cast<std::size_t>(r)];
    const Header& other = theirs[static_cast<std::size_t>(r)];
    const int world = transport_->WorldRank(r);
    if (mine.sequence != other.sequence) {
      Fail(op, fmt::format("does not match rank {}, which calls {} as operation {}", world,
                           Describe(other.signature), other.sequence));
    }
    if (mine.signature != other.signature) {
      Fail(op,
           fmt::format("does not match rank {}, which calls {}", world, Describe(other.signature)));
    }
    const bool rows = op.signature.kind == OpKind::kAllToAll;
    if (mine.to != other.from || mine.from != other.to) {
      Fail(op, fmt::format("counts of {} do not match: this rank sends {} and expects {}, rank {} "
                           "expects {} and sends {}",
                           rows ? "rows" : "elements", mine.to, mine.from, world, other.from,
                           other.to));
    }
  }
}

void HostCommunicator::Carry(const Operation& op) {
  switch (op.signature.kind) {
    case OpKind::kAllReduce: return CarryAllReduce(op);
    case OpKind::kReduceScatter: return CarryReduceScatter(op);
    case OpKind::kAllGather:
    case OpKind::kAllToAll: return CarryRows(op);
    case OpKind::kBroadcast: return CarryBroadcast(op);
    case OpKind::kBarrier: return CarryBarrier();
    case OpKind::kSend:
      // An empty message travels too: a Recv of another size then finds out.
      return transport_->Post(Channel::kPointToPoint,
                              {op.signature.peer, Bytes(op.input), op.input.bytes()});
    case OpKind::kRecv: {
      const Message receive{op.signature.peer, Bytes(op.output), op.output.bytes()};
      return transport_->Exchange(Channel::kPointToPoint, {}, {&receive, 1});
    }
  }
}

std::byte* HostCommunicator::Scratch(std::int64_t bytes) {
  if (!scratch_ || scratch_.bytes() < bytes) scratch_ = Tensor::Empty({bytes}, DType::kU8);
  return Bytes(scratch_);
}

// Rounds of a reduce-scatter and an all-gather, each over elements that fit the scratch memory. In
// place: other ranks read the slices that are theirs, this rank writes its own, then the others'.
void HostCommunicator::CarryAllReduce(const Operation& op) {
  const std::int64_t n = size(), element = ElementBytes(op), total = op.signature.elements;
  if (n == 1 || total == 0) return;
  std::byte* data = Bytes(op.input);
  std::vector<const std::byte*> sources(static_cast<std::size_t>(n));

  if (n * total * element <= kOneRoundBytes) {
    std::byte* scratch = Scratch(n * total * element);
    std::vector<ConstMessage> sends;
    std::vector<Message> receives;
    for (int r = 0; r < n; ++r) {
      std::byte* from = r == rank() ? data : scratch + r * total * element;
      sources[static_cast<std::size_t>(r)] = from;
      if (r == rank()) continue;
      sends.push_back({r, data, total * element});
      receives.push_back({r, from, total * element});
    }
    transport_->Exchange(Channel::kCollective, sends, receives);
    ReduceInOrder(op.signature.reduce, op.signature.dtype, sources, total, data);
    return;
  }

  const std::int64_t block = std::max<std::int64_t>(kScratchBytes / element, n);
  for (std::int64_t begin = 0; begin < total; begin += block) {
    const std::int64_t count = std::min(block, total - begin);
    const auto slice = [&](std::int64_t r) { return (begin + r * count / n) * element; };
    const auto bytes = [&](std::int64_t r) { return slice(r + 1) - slice(r); };
    const std::int64_t own = bytes(rank());
    std::byte* scratch = Scratch(n * own);
    std::vector<ConstMessage> scatter, gather;
    std::vector<Message> parts, results;
    for (int r = 0; r < n; ++r) {
      std::byte* part = r == rank() ? data + slice(r) : scratch + r * own;
      sources[static_cast<std::size_t>(r)] = part;
      if (r == rank()) continue;
      if (bytes(r) > 0) {
        scatter.push_back({r, data + slice(r), bytes(r)});
        results.push_back({r, data + slice(r), bytes(r)});
      }
      if (own > 0) {
        parts.push_back({r, part, own});
        gather.push_back({r, data + slice(rank()), own});
      }
    }
    transport_->Exchange(Channel::kCollective, scatter, parts);
    ReduceInOrder(op.signature.reduce, op.signature.dtype, sources, own / element,
                  data + slice(rank()));
    transport_->Exchange(Channel::kCollective, gather, results);
  }
}

void HostCommunicator::CarryReduceScatter(const Operation& op) {
  const std::int64_t n = size(), element = ElementBytes(op);
  const std::int64_t longest = *std::max_element(op.to.begin(), op.to.end());
  const std::int64_t block = std::max<std::int64_t>(kScratchBytes / (n * element), 1);
  std::vector<const std::byte*> sources(static_cast<std::size_t>(n));
  for (std::int64_t begin = 0; begin < longest; begin += block) {
    // Of the slice of `count` elements, those of this round.
    const auto elements = [&](std::int64_t count) {
      return std::clamp<std::int64_t>(count - begin, 0, block);
    };
    const std::int64_t own = elements(op.from[0]) * element;
    std::byte* scratch = Scratch(n * own);
    std::vector<ConstMessage> sends;
    std::vector<Message> receives;
    const std::byte* slice = Bytes(op.input);
    for (int r = 0; r < n; ++r) {
      const std::int64_t count = op.to[static_cast<std::size_t>(r)];
      const std::byte* here = slice + begin * element;
      slice += count * element;
      std::byte* part = scratch + r * own;
      sources[static_cast<std::size_t>(r)] = r == rank() ? here : part;
      if (r == rank()) continue;
      if (elements(count) > 0) sends.push_back({r, here, elements(count) * element});
      if (own > 0) receives.push_back({r, part, own});
    }
    transport_->Exchange(Channel::kCollective, sends, receives);
    if (own > 0) {
      ReduceInOrder(op.signature.reduce, op.signature.dtype, sources, own / element,
                    Bytes(op.output) + begin * element);
    }
  }
}

void HostCommunicator::CarryRows(const Operation& op) {
  // An all-gather sends the same part to everybody, an all-to-all one after the other.
  const bool same_part = op.signature.kind == OpKind::kAllGather;
  const std::byte* from = Bytes(op.input);
  std::byte* to = Bytes(op.output);
  std::vector<ConstMessage> sends;
  std::vector<Message> receives;
  for (int r = 0; r < size(); ++r) {
    const std::int64_t sent = op.to[static_cast<std::size_t>(r)] * op.unit_bytes;
    const std::int64_t received = op.from[static_cast<std::size_t>(r)] * op.unit_bytes;
    if (r == rank()) {
      if (to != from && sent > 0) std::memcpy(to, from, static_cast<std::size_t>(sent));
    } else {
      if (sent > 0) sends.push_back({r, from, sent});
      if (received > 0) receives.push_back({r, to, received});
    }
    if (!same_part) from += sent;
    to += received;
  }
  transport_->Exchange(Channel::kCollective, sends, receives);
}

// Binomial tree: in round k, counted from the root, ranks below 2^k send to those 2^k further on.
void HostCommunicator::CarryBroadcast(const Operation& op) {
  if (op.input.bytes() == 0) return;
  const int n = size(), root = op.signature.peer, position = (rank() - root + n) % n;
  for (int reach = 1; reach < n; reach *= 2) {
    if (position < reach && position + reach < n) {
      const ConstMessage send{(rank() + reach) % n, Bytes(op.input), op.input.bytes()};
      transport_->Exchange(Channel::kCollective, {&send, 1}, {});
    } else if (position >= reach && position < 2 * reach) {
      const Message receive{(rank() - reach + n) % n, Bytes(op.output), op.output.bytes()};
      transport_->Exchange(Channel::kCollective, {}, {&receive, 1});
    }
  }
}

// Dissemination barrier (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization",
// 1988): after round k every rank has heard, through others, from 2^(k+1) − 1 ranks before it.
void HostCommunicator::CarryBarrier() {
  const int n = size();
  std::byte out{}, in{};
  for (int reach = 1; reach < n; reach *= 2) {
    const ConstMessage send{(rank() + reach) % n, &out, 1};
    const Message receive{(rank() - reach + n) % n, &in, 1};
    transport_->Exchange(Channel::kCollective, {&send, 1}, {&receive, 1});
  }
}

}  // namespace cistron::comm
