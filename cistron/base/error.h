// Errors for people: what was wrong, where, which value, what to change.
//
// The library throws `cistron::Error` and never aborts the process; the program turns the code into
// an exit status. A message begins with the name of the op, file or key that it is about.
#pragma once

#include <fmt/core.h>

#include <exception>
#include <string>
#include <string_view>

namespace cistron {

enum class ErrorCode {
  kInvalidArgument,   // a call, key or value that can never work
  kBadInput,          // a file that is damaged, malformed or of another kind
  kNotFound,          // a path, tensor, preset or key that does not exist
  kIo,                // the operating system refused: permission, full disk, …
  kAlreadyExists,     // an output that must not be overwritten
  kUnsupported,       // meaningful, but not done by this build or device
  kNumericalFailure,  // NaN or Inf where a number must be
  kOutOfMemory,
  kInternal,  // a broken invariant of ours
};

std::string_view ErrorCodeName(ErrorCode code);

class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, std::string where = {});

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // Source position of the check that failed; empty for errors raised without one.
  const std::string& where() const { return where_; }
  // The message alone: it is written for the user; `where()` is for the developer.
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
  std::string where_;
};

namespace internal {
[[noreturn]] void ThrowFormatted(ErrorCode code, const char* file, int line,
                                 fmt::string_view format, fmt::format_args args);

template <class... Args>
[[noreturn]] void Throw(ErrorCode code, const char* file, int line,
                        fmt::format_string<Args...> format, Args&&... args) {
  ThrowFormatted(code, file, line, format, fmt::make_format_args(args...));
}
}  // namespace internal

}  // namespace cistron

// Throws cistron::Error with a code and an fmt-style message.
#define CISTRON_THROW(code, ...) \
  ::cistron::internal::Throw(::cistron::ErrorCode::code, __FILE__, __LINE__, __VA_ARGS__)

// Throws kInvalidArgument with an fmt-style message unless `cond` holds. Always on.
#define CISTRON_CHECK(cond, ...)                    \
  do {                                              \
    if (!(cond)) [[unlikely]] {                     \
      CISTRON_THROW(kInvalidArgument, __VA_ARGS__); \
    }                                               \
  } while (false)

// As CISTRON_CHECK for an invariant of our own: a failure is a bug in Cistron.
#define CISTRON_INVARIANT(cond, ...)         \
  do {                                       \
    if (!(cond)) [[unlikely]] {              \
      CISTRON_THROW(kInternal, __VA_ARGS__); \
    }                                        \
  } while (false)
