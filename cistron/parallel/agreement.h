// Ranks that must agree: texts that all of them know, and failures that end all of them alike.
//
// Work that may fail on one rank alone (opening files, reading a checkpoint) would leave the others
// waiting in their next collective. FromFirst and FromAll carry the failure to every rank instead.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/comm/communicator.h"

namespace cistron::parallel {

// An error that every rank throws at the same place, with the same message: one of them prints it.
class SharedError final : public Error {
 public:
  using Error::Error;
};

// The first rank calls `work`; every rank returns its result, or throws its error as SharedError.
std::string FromFirst(comm::Communicator& ranks, const std::function<std::string()>& work);

// Every rank calls `work`, which must not communicate; every rank returns the results of all, by
// rank. Where it throws on some, every rank throws the error of the lowest of them as SharedError;
// a message of one rank that is not the first begins with its number.
std::vector<std::string> FromAll(comm::Communicator& ranks,
                                 const std::function<std::string()>& work);

// Whether `mine` is true on any rank.
bool AnyOf(comm::Communicator& ranks, bool mine);

}  // namespace cistron::parallel
