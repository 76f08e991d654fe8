// Writes records into the extents granted to one client. Thread-safe; copies run side by side.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "queue/arena.h"
#include "queue/manager.h"
#include "queue/record.h"

namespace psrl {

class QueueWriter;

// A record with its payload written, invisible until commit(). Dropped uncommitted, it is aborted.
class PendingRecord {
 public:
  PendingRecord(PendingRecord&& other) noexcept;
  PendingRecord& operator=(PendingRecord&& other) noexcept;
  ~PendingRecord();

  // Makes it visible. Raises Revoked if the extent was taken away (the client counts as dead).
  RecordRef commit();

 private:
  friend class QueueWriter;
  PendingRecord(std::shared_ptr<Arena> arena, ClientId client, RecordRef ref, RecordHeader* header)
      : arena_(std::move(arena)), client_(client), ref_(ref), header_(header) {}

  std::shared_ptr<Arena> arena_;
  ClientId client_;
  RecordRef ref_;
  RecordHeader* header_;  // null: committed or moved from
};

// A planned record with the bytes of its fields.
struct PlannedRecord {
  Description description;
  uint64_t length = 0;
  std::vector<ConstBytes> payload;  // of each field
};

class QueueWriter {
 public:
  QueueWriter(std::shared_ptr<Arena> arena, ClientId client);

  // Takes what the manager granted. An extent it has already is ignored.
  void add(std::span<const Grant> grants);

  // Extents in hand, to be named to the manager when asking for more.
  std::vector<uint32_t> held() const;

  // Writes records, as many from the first as there is room for in the extents in hand; adds them
  // to `pending`. If that is not all, ask the manager for room and call again with the rest.
  void begin(std::span<const PlannedRecord> records, std::vector<PendingRecord>& pending);

  // Seals all extents in hand: their unused rest is given up until they are empty.
  void seal();

 private:
  struct Slot {
    RecordRef ref;
    RecordHeader* header;
  };
  std::optional<Slot> allocate(uint64_t length);
  void seal(const Grant& grant);
  bool owns(const Grant& grant) const;

  std::shared_ptr<Arena> arena_;
  const ClientId client_;
  mutable std::mutex mutex_;
  std::deque<Grant> grants_;
};

}  // namespace psrl
