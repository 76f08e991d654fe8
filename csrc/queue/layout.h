// What stands where in a queue's segment. Shared by processes, so: fixed-width, lock-free atomics,
// no pointers.
//
//   ArenaHeader | ClientEntry[max_clients] | ExtentEntry[num_extents]
//               | lease words [max_clients][num_extents] | extents (4 KiB aligned)
//
// An extent's life, in ExtentEntry::word (generation << 8 | state):
//
//   FREE --grant--> GRANTED --seal--> SEALED --no live record--> DRAINING --no lease--> FREE
//        manager            writer           manager                      manager
//                                            generation + 1
//
// A row larger than one extent gets a run: the first extent as above, the others MEMBER.
#pragma once

#include <atomic>
#include <cstdint>

namespace psrl {

inline constexpr uint64_t kArenaMagic = 0x31415145'4C525350;  // "PSRLEQA1"

struct ArenaHeader {
  uint64_t extent_bytes;
  uint64_t num_extents;
  uint32_t max_clients;
  uint32_t reserved;
  std::atomic<uint64_t> magic;  // written last
};

// A process that writes or reads. Its number is its place in the table; `incarnation` grows each
// time the place changes hands, and is even while nobody has it.
struct alignas(128) ClientEntry {
  std::atomic<uint32_t> incarnation;
  uint32_t name_length;
  char name[112];
};
static_assert(sizeof(ClientEntry) == 128);

enum class ExtentState : uint8_t { kFree = 0, kGranted, kSealed, kDraining, kMember };

struct alignas(64) ExtentEntry {
  std::atomic<uint64_t> word;
  std::atomic<uint64_t> bump;   // bytes given to records so far
  std::atomic<uint32_t> live;   // records being written or committed, not freed
  std::atomic<uint32_t> run;    // extents of this grant
  std::atomic<uint32_t> owner;  // the writer's number and
  std::atomic<uint32_t> owner_incarnation;
};
static_assert(sizeof(ExtentEntry) == 64);

constexpr uint64_t extent_word(uint64_t generation, ExtentState state) {
  return generation << 8 | static_cast<uint8_t>(state);
}
constexpr uint64_t generation_of(uint64_t word) { return word >> 8; }
constexpr ExtentState state_of(uint64_t word) { return static_cast<ExtentState>(word & 0xFF); }

// Lease word of (client, extent): incarnation << 32 | number of leases.
using LeaseWord = std::atomic<uint64_t>;

inline constexpr uint32_t kRecordMagic = 0x52525350;  // "PSRR"

// kWriting -> kCommitted (the one release-store that makes it visible) -> kFreed, or -> kAborted.
enum class RecordState : uint32_t { kWriting = 1, kCommitted, kFreed, kAborted };

struct RecordHeader {
  uint32_t magic;
  std::atomic<uint32_t> state;
  uint64_t length;      // of the whole record, a multiple of 64
  uint64_t written_ns;  // CLOCK_REALTIME: the order of records of one key, also across nodes
  uint32_t meta_bytes;  // of the description that follows this header
  uint32_t checksum;    // CRC-32C of the description
  uint64_t reserved[4];
};
static_assert(sizeof(RecordHeader) == 64);

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace psrl
