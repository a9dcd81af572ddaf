#include "cistron/comm/operation.h"

#include <fmt/format.h>

namespace cistron::comm {

std::string_view Name(ReduceOp reduce) {
  switch (reduce) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kMin: return "min";
  }
  return "unknown";
}

std::string_view Name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kSend: return "send";
    case OpKind::kRecv: return "recv";
  }
  return "unknown";
}

bool IsCollective(OpKind kind) {
  return kind != OpKind::kSend && kind != OpKind::kRecv;
}

bool IsReduction(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
}

std::string Describe(const Signature& s) {
  std::string text(Name(s.kind));
  if (s.kind == OpKind::kBarrier) return text;
  if (IsReduction(s.kind)) text += fmt::format(" {}", Name(s.reduce));
  if (s.kind == OpKind::kAllToAll) {
    text += fmt::format(" of rows of {} {}", s.row_elements, cistron::Name(s.dtype));
  } else {
    text += fmt::format(" of {} {}", s.elements, cistron::Name(s.dtype));
  }
  if (s.kind == OpKind::kBroadcast || s.kind == OpKind::kRecv) {
    text += fmt::format(" from rank {}", s.peer);
  } else if (s.kind == OpKind::kSend) {
    text += fmt::format(" to rank {}", s.peer);
  }
  return text;
}

}  // namespace cistron::comm
