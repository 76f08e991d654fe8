// Links: bulk data between processes on different nodes. One contract, two transports (tcp, ucx).
//
// Who calls what. Each process has one Endpoint with one progress thread of its own, which never
// runs foreign code but the EventSink. The owner of memory adds it once as a Region. A receiver
// advertises a Window of a region; the Advert is plain bytes and travels in any message. A sender
// puts into it, a puller reads from it.
//
//     receiver                                   sender
//     region = add_region(segment)               region = add_region(segment)
//     advert = advertise(region, ..., kPut)  -->  peer = connect(address)
//                                                put(peer, advert, pieces, notice)
//     kNotice(peer, notice)                 <--  (data first, then the notice)
//     withdraw(advert)                           close()
//
// Promises, the same for both transports and tested by one suite
// (tests/cpp/link_contract_test.cpp):
//  - Every operation ends exactly once, with kOk or a reason, no later than its deadline (checked
//    every few ms).
//  - kOk of a put: its bytes are in the peer's memory, and its notice (if any) will be seen after
//    them, never before. Until then the source bytes belong to the operation. Puts to one peer need
//    not end in the order they began.
//  - A put that ended otherwise leaves its window undefined, and bytes under way may still land
//    there: whoever tries again by another way withdraws the window and advertises a new one.
//  - kOk of a pull: the bytes are in local memory.
//  - Until an operation ends, its local memory must stay; after it ended, however it ended, the
//    transport touches it no more.
//  - A window whose generation is over (withdrawn, or its region removed) is refused by kStale:
//    nothing is written. After withdraw() returned, nothing is written there any more: an operation
//    in the middle of it is cut (its peer connection with it, if there is no other way).
//  - A peer that dies, hangs up or breaks the protocol ends all operations with it by kPeerLost, at
//    once or by their deadlines, and one kPeerLost event names it and why. Nothing waits for ever,
//    nothing crashes.
//  - Each kPeerConnected (they connected) and each connect that ended with kOk (we did) is followed
//    by exactly one kPeerLost: status kClosed after a goodbye, whoever said it first, else
//    kPeerLost. Both go to poll().
//  - close() is a barrier: flushes, says goodbye, goes on progressing until peers have said theirs
//    or the deadline is over. What is submitted after it ends with kClosed; poll() goes on giving
//    what happened.
//  - A peer that says goodbye is answered: operations with it go on to their end, new ones end with
//    kPeerLost.
//  - Mistakes that the caller alone can make raise LinkError at once: a piece outside of its local
//    region, a read-only region where bytes would arrive, a notice that is too long, an address
//    that cannot be read. What depends on the peer (an unknown one, a range outside of the advert)
//    is the status of the operation.
//
// Memory safety against peers: `tcp` proves on connect that both sides know the token and checks
// every range against an advertised window before a byte is taken. `ucx` trusts its network, as
// RDMA does: it is for closed fabrics.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "shm/segment.h"

namespace psrl::link {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

enum class Status : uint8_t {
  kOk = 0,
  kTimeout,   // not done by its deadline
  kPeerLost,  // the peer ended, hung up, or broke the protocol
  kRefused,   // wrong token, wrong protocol version, or a range outside of the window
  kStale,     // the window's generation is over
  kClosed,    // this endpoint is closing
};

enum class WindowAccess : uint8_t { kPut = 1, kPull = 2 };

// Memory that links may touch, registered once (link/region.h). Ends with the last reference; the
// endpoint keeps one until remove_region or close, windows and operations keep theirs.
class Region;
using RegionPtr = std::shared_ptr<Region>;

// A peer of this endpoint; numbers are not used again.
using PeerId = uint64_t;
using OpId = uint64_t;

// A window as told to peers: where its endpoint listens is not part of it. At most kMaxAdvertBytes
// when encoded.
struct Advert {
  uint64_t window = 0;
  uint64_t generation = 0;
  uint64_t length = 0;
  WindowAccess access = WindowAccess::kPut;
  MemoryKind memory_kind = MemoryKind::kHost;
  int32_t numa_node = -1;  // -1: unknown
  std::string key;         // the transport's own; empty for tcp

  std::string encode() const;
  static Advert decode(std::string_view encoded);  // raises LinkError
};
inline constexpr size_t kMaxAdvertBytes = 1024;

// One contiguous copy between a local region and a peer's window. Offsets in bytes.
struct Piece {
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
};

// A few bytes that arrive after the data they were sent with. Its meaning is the callers'.
inline constexpr size_t kMaxNoticeBytes = 512;

struct Event {
  enum class Kind : uint8_t { kDone, kNotice, kPeerConnected, kPeerLost } kind = Kind::kDone;
  PeerId peer = 0;
  OpId op = 0;  // kDone
  Status status = Status::kOk;
  // kDone: why not, or for a connect that went well the peer's name; kPeerLost: why;
  // kPeerConnected: the peer's name; kNotice: the bytes.
  std::string text;
};

// Called on the progress thread, so it must not block; it may submit operations.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_event(const Event& event) = 0;
};

struct PeerCounters {
  std::string name, address;
  uint64_t bytes_put = 0, bytes_received = 0, puts = 0, pulls = 0, notices = 0, failures = 0;
};

struct EndpointOptions {
  std::string name;                // told to peers, shown in errors
  std::string host = "127.0.0.1";  // the address to listen on; what peers connect to
  uint16_t port = 0;               // 0: any free one
  std::string token;               // the cluster token, at least 16 bytes; ucx does without
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // "tcp:10.77.0.1:4711", "ucx:10.77.0.1:4712": what connect() of a peer takes.
  virtual std::string address() const = 0;
  // For people: "tcp", or "ucx 1.22.0 (/usr/lib/.../libucp.so.0) over tcp".
  virtual std::string describe() const = 0;

  virtual RegionPtr add_region(std::shared_ptr<Segment> segment) = 0;
  // Memory of any other owner, kept alive by `owner`.
  virtual RegionPtr add_region(Bytes memory, std::shared_ptr<const void> owner) = 0;
  // Withdraws its windows and forgets it. Operations on it must have ended.
  virtual void remove_region(const RegionPtr& region) = 0;

  virtual Advert advertise(const RegionPtr& region, uint64_t offset, uint64_t length,
                           WindowAccess access) = 0;
  virtual void withdraw(const Advert& advert) = 0;

  // All of these return at once; a kDone event with the returned number follows. connect's names
  // the peer. No pieces, or pieces of no bytes, are fine. `sink` gets the events of this one
  // operation instead of poll(); null: poll().
  virtual OpId connect(const std::string& address, Deadline deadline,
                       EventSink* sink = nullptr) = 0;
  virtual OpId put(PeerId peer, const Advert& into, const RegionPtr& from,
                   std::span<const Piece> pieces, std::string_view notice, Deadline deadline,
                   EventSink* sink = nullptr) = 0;
  virtual OpId pull(PeerId peer, const Advert& from, const RegionPtr& into,
                    std::span<const Piece> pieces, Deadline deadline,
                    EventSink* sink = nullptr) = 0;
  // A notice alone, after everything that was put to the peer before it.
  virtual OpId notify(PeerId peer, std::string_view notice, Deadline deadline,
                      EventSink* sink = nullptr) = 0;
  // Ends when all that was submitted to the peer before it has ended.
  virtual OpId flush(PeerId peer, Deadline deadline, EventSink* sink = nullptr) = 0;

  // Notices that begin with `prefix` go to `sink` instead of poll(), until set to null: after that
  // returned, `sink` is not called any more. The longest prefix wins.
  virtual void route_notices(std::string_view prefix, EventSink* sink) = 0;

  // Takes what happened since the last call. `fd` is readable while there is something.
  virtual std::vector<Event> poll() = 0;
  virtual int fd() const = 0;

  virtual std::vector<PeerCounters> counters() const = 0;

  // Returns at once: says goodbye to one peer; its operations end with kClosed. The connection ends
  // by the deadline.
  virtual void disconnect(PeerId peer, Deadline deadline) = 0;
  // Barrier; idempotent; the destructor calls it with a short deadline. True: every peer said
  // goodbye.
  virtual bool close(Deadline deadline) = 0;
};

std::unique_ptr<Endpoint> make_tcp_endpoint(const EndpointOptions& options);
// Raises LinkError when built without UCX (WITH_UCX=OFF) or when libucp cannot be used, saying what
// to install.
std::unique_ptr<Endpoint> make_ucx_endpoint(const EndpointOptions& options);

}  // namespace psrl::link
