// One transfer at one node: parts of a version arrive, are compared, counted and handed on.
//
// A transfer moves some memory (a slot of weights, or a patch) from nodes that have parts of it to
// nodes that lack them, in units of some MiB. At each node a Relay knows which units are there. A
// unit arrives by a put of the predecessor with a notice; the relay compares its checksum and puts
// it on to each successor that wants it, a few at a time. All of that happens on the link's
// progress thread. The owner (psrl/weights/server.py, or a test) says who the successors are, looks
// at the progress, and may change the way while it runs: a successor that hangs on somebody else
// from now on is told by `close_window` and `open_window`, and says with `have` what it needs.
//
// Promises:
//  - A unit is counted once, when its bytes were compared with the checksum that came with them.
//    Damaged, it is asked for again; after `max_attempts` the transfer fails, by name.
//  - Notices of another transfer, of a window that was closed, or of a unit that is there already
//    are ignored.
//  - After `close` nothing is put any more and nothing arrives. What was under way ends with the
//    link's deadlines; the memory must stay mapped until then (the region sees to it), but it may
//    be written: whoever gets such bytes sees by their checksum that they are none of the version.
//
// Checksums. If units lie within chunks of `chunk_bytes` and fill them in order, the sum of a unit
// is the running CRC-32C of its chunk, begun with the chunk's number as the store does, up to the
// unit's end; a notice has it before and after. So the sum of the last one is the chunk's as it
// stands in the store's table: no second pass is needed, and `expected` can be compared. Otherwise
// a unit's sum is over its ranges, begun with its number.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"
#include "link/link.h"
#include "weights/store.h"

namespace psrl::weights {

// Bytes of the memory that is moved.
struct Range {
  uint64_t offset = 0;
  uint64_t length = 0;
};

// What travels as one.
using Unit = std::vector<Range>;

struct RelayOptions {
  uint64_t transfer = 0;  // the same at all nodes, never used again
  std::vector<Unit> units = {};
  uint64_t chunk_bytes = 0;             // 0: a sum for each unit by itself
  std::vector<uint32_t> expected = {};  // the chunks' sums, if they are known
  uint32_t max_in_flight = 4;           // units under way to one successor
  uint32_t max_attempts = 3;
  std::chrono::milliseconds put_timeout{30'000};
  // Asked before each put; false: the memory does not hold the version any more.
  std::function<bool()> valid = {};
};

struct SuccessorProgress {
  std::string name;
  uint64_t wanted = 0;   // units that are to be put there
  uint64_t arrived = 0;  // of them
  uint64_t in_flight = 0;
  std::string problem;  // why nothing is put there any more
};

struct RelayProgress {
  uint64_t num_units = 0;
  uint64_t have = 0;
  uint64_t have_bytes = 0;
  uint64_t damaged = 0;    // units that arrived with a wrong checksum
  uint64_t in_flight = 0;  // operations that have not ended, also of successors that were left
  double idle_s = 0;       // since a unit arrived here or at a successor
  std::string problem;     // why the transfer cannot go on at this node
  bool complete = false;   // all units are here
  std::vector<SuccessorProgress> successors;
};

class Relay final : public link::EventSink, public std::enable_shared_from_this<Relay> {
 public:
  // The `length` bytes from `offset` of `region` are what is moved. `have` has one entry for each
  // unit: is it there? `endpoint` must stay until `close`, which must come before the relay is let
  // go of.
  static std::shared_ptr<Relay> open(link::Endpoint& endpoint, link::RegionPtr region,
                                     uint64_t offset, uint64_t length, RelayOptions options,
                                     std::vector<bool> have);
  ~Relay() override = default;

  // A window for one predecessor (and one source's part, if there are several); the one that was
  // opened under this key before is closed.
  link::Advert open_window(const std::string& key);
  void close_window(const std::string& key);

  // Puts units `first` to `end` (excluded) to a successor as they get here, but those that it has.
  // What was sent under this name is replaced.
  void send_to(const std::string& name, link::PeerId peer, const link::Advert& into, uint64_t first,
               uint64_t end, const std::vector<bool>& has);
  void stop_sending(const std::string& name);

  std::vector<bool> have() const;
  RelayProgress progress() const;
  // Bytes that came since the relay was opened.
  uint64_t arrived_bytes() const;
  // Sums of all chunks, once complete. Empty if units have sums of their own.
  std::vector<uint32_t> chunk_sums() const;
  // Readable when there is a problem or all is complete, here or at a successor.
  int fd() const { return changed_.get(); }

  void close();

  void on_event(const link::Event& event) override;

 private:
  struct Successor {
    uint64_t number = 0;  // never used again
    link::PeerId peer = 0;
    link::Advert into;
    uint64_t first = 0, end = 0;
    std::vector<uint64_t> queue;  // a heap: the lowest unit first
    uint64_t wanted = 0, arrived = 0, in_flight = 0;
    std::string problem;
  };
  struct Flight {
    std::string name;  // of the successor; empty for what was asked
    uint64_t number = 0;
  };
  struct Sums {
    uint32_t before = 0, after = 0;
  };

  Relay(link::Endpoint& endpoint, link::RegionPtr region, uint64_t offset, uint64_t length,
        RelayOptions options, std::vector<bool> have);

  void on_unit(link::PeerId peer, std::string_view notice);
  void on_ask(link::PeerId peer, std::string_view notice);
  void on_done(const link::Event& event);
  void ask(link::PeerId peer, uint64_t unit);
  void accept(uint64_t unit, const Sums& sums);
  void enqueue(Successor& successor, uint64_t unit);
  void pump(const std::string& name, Successor& successor);
  void put(const std::string& name, Successor& successor, uint64_t unit);
  void note(link::OpId op, Flight flight);
  void settle(uint64_t unit);
  bool within_chunks() const { return options_.chunk_bytes != 0; }
  uint64_t chunk_of(uint64_t unit) const;
  bool begins_chunk(uint64_t unit) const;
  bool ends_chunk(uint64_t unit) const;
  uint32_t sum(uint64_t unit, uint32_t before) const;
  void fail(std::string problem);
  void wake() const;

  link::Endpoint& endpoint_;
  const link::RegionPtr region_;
  const uint64_t offset_, length_;
  const RelayOptions options_;
  const std::string prefix_;
  const Fd changed_;

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<Relay> self_;  // while operations are under way
  std::map<link::OpId, Flight> flights_;
  std::map<std::string, link::Advert> windows_;
  std::map<std::string, Successor> successors_;
  uint64_t next_number_ = 1;
  std::vector<bool> have_, summed_;
  std::vector<Sums> sums_;
  std::vector<uint8_t> attempts_;
  uint64_t num_have_ = 0, have_bytes_ = 0, had_bytes_ = 0, damaged_ = 0;
  link::Clock::time_point changed_at_;
  std::string problem_;
};

// Seals a slot that a complete relay filled: counts what arrived, takes over the sums that were
// compared, computes those that are missing.
void seal_arrived(WeightStore& store, const Ticket& ticket, const Relay& relay,
                  uint64_t expected_bytes);

}  // namespace psrl::weights
