// Who has which extent. One manager at a time, in the StorageActor. Its truth is in the segment, so
// a restarted one opens the arena and goes on; what it keeps in its own memory (which extents are
// free, which ones each client has open) is only there so that a grant need not look at all of
// them. Writers seal and readers let go without telling, so a full walk is made when a grant finds
// no room.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "queue/arena.h"
#include "queue/free_runs.h"
#include "queue/record.h"

namespace psrl {

// `run` extents from `extent`, given to one writer.
struct Grant {
  uint32_t extent = 0;
  uint64_t generation = 0;
  uint32_t run = 1;
};

struct RecordInfo {
  RecordRef ref;
  Description description;
  uint64_t written_ns = 0;
};

struct Released {
  bool known = false;
  ClientId client;
  uint32_t num_extents = 0;  // were still open and are sealed now
  uint64_t num_leases = 0;
  uint64_t num_records = 0;  // committed ones of this client, which stay
};

// A part of a scan: the records of some extents, and where to go on.
struct ScanPage {
  std::vector<RecordInfo> records;
  uint32_t next = 0;  // num_extents(): that was all
};

// Where the arena's bytes are, in whole extents.
struct ArenaUsage {
  uint64_t free = 0;
  uint64_t open = 0;    // at writers
  uint64_t rows = 0;    // hold committed records (and what was freed beside them)
  uint64_t leased = 0;  // empty, but readers still look at them
};

class ArenaManager {
 public:
  // `arena` may have a past; recovers from a predecessor that died anywhere in its work.
  explicit ArenaManager(std::shared_ptr<Arena> arena);

  // A place for the client. One registered under the same name is released first: a restarted
  // process takes its place. Raises StorageError when the table is full.
  ClientId register_client(const std::string& name);

  // Extents for a record of `bytes`: up to `count` single ones, or one run if it needs several.
  // Those that the client has already but does not list in `held` come first, so asking again
  // after a lost answer loses nothing. `keep` extents stay free. Empty: no room now.
  std::vector<Grant> grant(ClientId client, uint64_t bytes, uint32_t count,
                           std::span<const uint32_t> held, uint32_t keep = 0);

  // Frees a committed record; false if it is not there (any more). Idempotent.
  bool free(const RecordRef& ref);

  // The process is dead: its open extents are sealed, its leases returned, its half-written
  // records forgotten. Idempotent.
  Released release_client(const std::string& name);

  // Is it a committed record that was not freed?
  bool holds(const RecordRef& ref) const { return find(ref) != nullptr; }

  // Committed records of the extents from `first` on, at least `max_records` of them unless there
  // are no more; of one client's extents only, if `owner` is given. In no order.
  ScanPage scan(uint32_t first, size_t max_records,
                std::optional<ClientId> owner = std::nullopt) const;
  // All of them, by time of writing.
  std::vector<RecordInfo> scan() const;

  // The life that each place of the client table is in, see ClientEntry.
  std::vector<uint32_t> incarnations() const;

  // Gives back what is empty and unleased.
  void sweep();

  // After a sweep.
  ArenaUsage usage();
  uint64_t free_bytes() { return usage().free; }

  const Arena& arena() const { return *arena_; }

 private:
  // Extents of the grant that begins there; what a damaged entry says is kept within the arena.
  uint32_t run_of(uint32_t extent) const;
  std::optional<uint32_t> find_client(const std::string& name) const;
  void recover();
  std::vector<Grant> take(ClientId client, uint32_t run, uint32_t count, uint32_t keep);
  Grant give(ClientId client, uint32_t extent, uint32_t run);
  bool is_open(uint32_t extent, ClientId client) const;
  // A sealed extent without live records becomes free, or waits until nobody leases it.
  void reclaim(uint32_t extent);
  RecordHeader* find(const RecordRef& ref) const;
  void recount(uint32_t extent, bool abort_unfinished);
  // Calls visit(header, offset, length) for each record; the length has been checked.
  void for_each_record(uint32_t extent,
                       const std::function<void(RecordHeader&, uint64_t, uint64_t)>& visit) const;
  void collect(uint32_t extent, std::vector<RecordInfo>& into) const;

  std::shared_ptr<Arena> arena_;
  FreeRuns free_;
  std::vector<std::vector<uint32_t>> open_;  // by client number: granted, not yet seen sealed
};

}  // namespace psrl
