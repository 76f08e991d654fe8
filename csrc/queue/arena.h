// The arena of a queue's segment: its tables, and leases on extents.
//
// Roles: one ArenaManager (in the StorageActor) moves extents between clients; a QueueWriter fills
// the extents granted to its client; a QueueReader views records under leases. All three stand on
// an Arena, each in any process.
#pragma once

#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/maker.h"
#include "queue/layout.h"
#include "queue/record.h"
#include "shm/segment.h"

namespace psrl {

// A registered client: its place in the table and which life of that place it is.
struct ClientId {
  uint32_t number = 0;
  uint32_t incarnation = 0;
  bool operator==(const ClientId&) const = default;
};

// How an arena is divided.
struct Geometry {
  uint64_t extent_bytes = 0;
  uint64_t num_extents = 0;
  uint32_t max_clients = 0;
};

class Arena {
 public:
  // Lays out a zeroed segment. Raises StorageError if it holds less than one extent.
  static std::shared_ptr<Arena> format(std::shared_ptr<Segment> segment, uint64_t extent_bytes,
                                       uint32_t max_clients);
  // Opens one that is laid out. Raises StorageError if it is not.
  static std::shared_ptr<Arena> open(std::shared_ptr<Segment> segment);
  static bool is_formatted(const Segment& segment);
  // Size of a segment that holds so many extents.
  static uint64_t segment_bytes(uint64_t num_extents, uint64_t extent_bytes, uint32_t max_clients);

  uint64_t extent_bytes() const { return extent_bytes_; }
  uint32_t num_extents() const { return num_extents_; }
  uint32_t max_clients() const { return max_clients_; }
  // Of this mapping.
  const Maker& maker() const { return maker_; }
  uint64_t capacity() const { return num_extents_ * extent_bytes_; }

  ClientEntry& client(uint32_t number) const { return clients_[number]; }
  ExtentEntry& extent(uint32_t index) const { return extents_[index]; }
  LeaseWord& lease_word(uint32_t client, uint32_t extent) const {
    return leases_[uint64_t{client} * num_extents_ + extent];
  }
  // The bytes of a grant: `run` extents from `index`.
  Bytes data(uint32_t index, uint32_t run = 1) const;

  // Raises Revoked if the client was released meanwhile.
  void check_client(ClientId client) const;

 private:
  // Sizes are taken from the header once and checked: what others write there later moves nothing.
  Arena(std::shared_ptr<Segment> segment, const Geometry& geometry);

  std::shared_ptr<Segment> segment_;
  uint64_t extent_bytes_;
  uint32_t num_extents_;
  uint32_t max_clients_;
  Maker maker_;
  ClientEntry* clients_ = nullptr;
  ExtentEntry* extents_ = nullptr;
  LeaseWord* leases_ = nullptr;
  std::byte* data_ = nullptr;
};

// While it lives, the extent is not given to anyone else, so what was read there stays as it is.
// Returned by the destructor, though not by that of a fork; a dead process's leases are returned by
// ArenaManager::release_client.
class Lease {
 public:
  // Raises UnknownKey if the extent is past that generation, Revoked if the client was released.
  Lease(std::shared_ptr<Arena> arena, ClientId client, uint32_t extent, uint64_t generation);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    if (arena_->maker().here()) give_back();
  }

 private:
  void give_back();

  std::shared_ptr<Arena> arena_;
  ClientId client_;
  uint32_t extent_;
};

}  // namespace psrl
