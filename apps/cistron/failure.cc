#include "apps/cistron/failure.h"

#include <cstdio>
#include <new>
#include <string_view>

#include "apps/cistron/command.h"
#include "apps/cistron/version.h"
#include "cistron/base/error.h"

namespace cistron::app {
namespace {

int StatusOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kBadInput:
    case ErrorCode::kNotFound:
    case ErrorCode::kAlreadyExists:
    case ErrorCode::kUnsupported:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kNumericalFailure: return kBadUsage;
    case ErrorCode::kIo:
    case ErrorCode::kInternal: break;
  }
  return kRuntimeFailure;
}

// By length: a message may quote a NUL.
void Print(std::string_view message) {
  std::fputs("error: ", stderr);
  std::fwrite(message.data(), 1, message.size(), stderr);
  std::fputc('\n', stderr);
}

}  // namespace

int StatusOf(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return StatusOf(ours->code());
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? kBadUsage : kRuntimeFailure;
}

int ReportFailure(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    Print(ours->message());
    if (ours->code() == ErrorCode::kInternal) {
      std::fprintf(stderr, "this is a bug in cistron %s (%s); please report it\n", kVersion,
                   ours->where().c_str());
    }
  } else if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    Print("out of memory; use a smaller batch.micro_tokens or model");
  } else {
    Print(error.what());
  }
  return StatusOf(error);
}

}  // namespace cistron::app
