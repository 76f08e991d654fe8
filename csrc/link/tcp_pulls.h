// The pulls of one connection that we asked for. A pull goes out as requests of at most kMaxRanges
// ranges each, some at a time; each is answered by its bytes in order, then an acknowledgement.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "link/frame.h"
#include "link/tcp_op.h"
#include "link/tcp_outbox.h"

namespace psrl::link::tcp {

// Requests unanswered at a time. A peer that has more of them, with some slack for those that were
// cancelled, breaks the protocol.
inline constexpr size_t kMaxRequests = 32;
inline constexpr size_t kMaxServed = 2 * kMaxRequests;

class Pulls {
 public:
  // Requests' numbers, so that they are no operation's.
  static constexpr uint64_t kRequestBit = 1ull << 63;

  explicit Pulls(Outbox& outbox) : outbox_(outbox) {}

  // It stays where it is until ended().
  void submit(const Op& op);
  // It ended; its memory is left alone. Returns the requests that may be in the middle of a
  // payload.
  std::vector<uint64_t> ended(OpId id);

  // Where the next `length` bytes of a request go; nothing if it was cancelled. Raises LinkError if
  // these are not the bytes that come next.
  std::vector<iovec> receive(uint64_t request, uint64_t position, uint64_t length);

  struct Ended {
    OpId id;
    Status status;
    std::string why;
  };
  // The peer says how a request ended; the pull that ended by it, if one did.
  std::optional<Ended> acknowledged(uint64_t request, Status status, std::string_view why);

 private:
  struct Pull {
    const Op* op = nullptr;
    size_t asked = 0;     // pieces that are in requests
    size_t requests = 0;  // unanswered
  };
  struct Request {
    OpId id = 0;
    size_t piece = 0;     // of the next byte to come
    uint64_t within = 0;  // ... and where in it
    uint64_t position = 0, total = 0;
  };

  void ask();

  Outbox& outbox_;
  uint64_t next_ = 1;
  std::map<OpId, Pull> pulls_;
  std::deque<OpId> turns_;  // those with pieces that are in no request yet
  std::map<uint64_t, Request> requests_;
};

}  // namespace psrl::link::tcp
