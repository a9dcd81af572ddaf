#include "cistron/parallel/agreement.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

namespace cistron::parallel {
namespace {

// A result or an error, as bytes that travel: the kind, then the text.
constexpr char kResult = 'r', kError = 'e';

std::string Encode(const std::function<std::string()>& work) {
  try {
    return kResult + work();
  } catch (const Error& e) {
    return fmt::format("{}{:02}{}", kError, static_cast<int>(e.code()), e.message());
  } catch (const std::bad_alloc&) {
    return fmt::format("{}{:02}{}", kError, static_cast<int>(ErrorCode::kOutOfMemory),
                       "not enough memory");
  } catch (const std::exception& e) {
    return fmt::format("{}{:02}{}", kError, static_cast<int>(ErrorCode::kInternal), e.what());
  }
}

bool Failed(const std::string& text) {
  return text.front() == kError;
}

[[noreturn]] void ThrowShared(const std::string& text, int rank, bool name_rank) {
  const auto code = static_cast<ErrorCode>((text[1] - '0') * 10 + (text[2] - '0'));
  const std::string message = text.substr(3);
  throw SharedError(code, name_rank ? fmt::format("rank {}: {}", rank, message) : message);
}

Tensor Count(std::int64_t value) {
  return Tensor::FromSpan<std::int64_t>({1}, std::span(&value, 1));
}

Tensor BytesOf(std::string& text) {
  return Tensor::Borrow(text.data(), {static_cast<std::int64_t>(text.size())}, DType::kU8);
}

}  // namespace

std::string FromFirst(comm::Communicator& ranks, const std::function<std::string()>& work) {
  if (ranks.size() == 1) return work();
  std::string text = ranks.rank() == 0 ? Encode(work) : std::string();
  const Tensor length = Count(static_cast<std::int64_t>(text.size()));
  ranks.Broadcast(length, 0);
  text.resize(static_cast<std::size_t>(*length.data<std::int64_t>()));
  ranks.Broadcast(BytesOf(text), 0);
  if (Failed(text)) ThrowShared(text, 0, false);
  return text.substr(1);
}

std::vector<std::string> FromAll(comm::Communicator& ranks,
                                 const std::function<std::string()>& work) {
  if (ranks.size() == 1) return {work()};
  std::string mine = Encode(work);
  const std::int64_t n = ranks.size();
  const Tensor lengths = Tensor::Empty({n}, DType::kI64);
  ranks.AllGather(Count(static_cast<std::int64_t>(mine.size())), lengths);
  const auto length = lengths.span<std::int64_t>();
  // Equal pieces: texts are short.
  const auto longest = static_cast<std::size_t>(*std::max_element(length.begin(), length.end()));
  mine.resize(longest);
  std::string all(longest * static_cast<std::size_t>(n), '\0');
  ranks.AllGather(BytesOf(mine), BytesOf(all));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < static_cast<std::size_t>(n); ++r) {
    texts.push_back(all.substr(r * longest, static_cast<std::size_t>(length[r])));
  }
  const auto failed = std::find_if(texts.begin(), texts.end(), Failed);
  if (failed != texts.end()) {
    const bool alike =
        std::all_of(texts.begin(), texts.end(), [&](const auto& t) { return t == *failed; });
    ThrowShared(*failed, static_cast<int>(failed - texts.begin()), !alike);
  }
  for (std::string& text : texts) text.erase(0, 1);
  return texts;
}

bool AnyOf(comm::Communicator& ranks, bool mine) {
  if (ranks.size() == 1) return mine;
  const Tensor any = Count(mine ? 1 : 0);
  ranks.AllReduce(any, comm::ReduceOp::kMax);
  return *any.data<std::int64_t>() != 0;
}

}  // namespace cistron::parallel
