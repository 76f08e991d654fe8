// One operation of the tcp transport, from its submission to its end.
#pragma once

#include "link/link.h"

namespace psrl::link::tcp {

struct Op {
  enum class Kind : uint8_t { kConnect, kPut, kPull, kNotify, kFlush };

  Kind kind = Kind::kFlush;
  OpId id = 0;
  PeerId peer = 0;
  Deadline deadline;
  EventSink* sink = nullptr;  // null: poll()
  std::string address;        // kConnect
  uint64_t window = 0;        // kPut, kPull
  uint64_t generation = 0;
  RegionPtr region;
  std::vector<Piece> pieces;   // none of no bytes
  std::string notice;          // kPut, kNotify
  Status early = Status::kOk;  // else: known at submission to end with this
  std::string why;
};

}  // namespace psrl::link::tcp
