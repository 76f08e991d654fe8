// Who has which extent. One manager at a time, in the StorageActor; all its state is in the
// segment, so a restarted one opens the arena, calls recover() and goes on.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "queue/arena.h"
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
  std::vector<RecordInfo> records;  // committed ones of this client, which stay
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
  // after a lost answer loses nothing. Empty: no room now.
  std::vector<Grant> grant(ClientId client, uint64_t bytes, uint32_t count,
                           std::span<const uint32_t> held);

  // Frees a committed record; false if it is not there (any more). Idempotent.
  bool free(const RecordRef& ref);

  // The process is dead: its open extents are sealed, its leases returned, its half-written
  // records forgotten. Idempotent.
  Released release_client(const std::string& name);

  // All committed records, by time of writing.
  std::vector<RecordInfo> scan() const;

  // Gives back what is empty and unleased. Called by grant and free_bytes.
  void sweep();

  // Bytes in free extents, after a sweep.
  uint64_t free_bytes();

  const Arena& arena() const { return *arena_; }

 private:
  // Extents of the grant that begins there; what a damaged entry says is kept within the arena.
  uint32_t run_of(uint32_t extent) const;
  std::optional<uint32_t> find_client(const std::string& name) const;
  void recover();
  std::optional<Grant> take(ClientId client, uint32_t run, bool from_the_end);
  void recount(uint32_t extent, bool abort_unfinished);
  // Calls visit(header, offset, length) for each record; the length has been checked.
  void for_each_record(uint32_t extent,
                       const std::function<void(RecordHeader&, uint64_t, uint64_t)>& visit) const;
  void collect(uint32_t extent, std::vector<RecordInfo>& into) const;

  std::shared_ptr<Arena> arena_;
};

}  // namespace psrl
