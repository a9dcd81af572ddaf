#include "cistron/base/error.h"

#include <utility>

namespace cistron {

std::string_view ErrorCodeName(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kBadInput: return "bad input";
    case ErrorCode::kNotFound: return "not found";
    case ErrorCode::kIo: return "input/output error";
    case ErrorCode::kAlreadyExists: return "already exists";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kNumericalFailure: return "numerical failure";
    case ErrorCode::kOutOfMemory: return "out of memory";
    case ErrorCode::kInternal: return "internal error";
  }
  return "unknown error";
}

Error::Error(ErrorCode code, std::string message, std::string where)
    : code_(code), message_(std::move(message)), where_(std::move(where)) {}

namespace internal {
void ThrowFormatted(ErrorCode code, const char* file, int line, fmt::string_view format,
                    fmt::format_args args) {
  throw Error(code, fmt::vformat(format, args), fmt::format("{}:{}", file, line));
}
}  // namespace internal

}  // namespace cistron
