// What every transport must do: run by the tests of each, on any number of ranks.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "cistron/comm/communicator.h"

namespace cistron::comm {

struct CollectiveCase {
  std::string name;
  std::function<void(Communicator&)> run;  // on every rank; reports through EXPECT_…

  friend std::ostream& operator<<(std::ostream& out, const CollectiveCase& c) {
    return out << c.name;
  }
};

std::vector<CollectiveCase> CollectiveCases();

}  // namespace cistron::comm
