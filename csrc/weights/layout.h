// What a segment of weights holds, byte for byte. Everything that changes is a lock-free atomic,
// because processes that share it may be killed between any two instructions.
//
//   StoreHeader | 3 x (SlotHeader, checksums of the chunks) | 3 x data; each part on its own pages
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace psrl::weights {

inline constexpr uint64_t kMagic = 0x31544857'4C525350;  // "PSRLWHT1"
inline constexpr uint64_t kPage = 4096;
inline constexpr size_t kSlots = 3;
inline constexpr size_t kMaxClients = 64;
inline constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

enum class SlotState : uint8_t { kFree = 0, kWriting = 1, kSealed = 2, kCommitted = 3 };

// State and generation in one word, so that no transition can be seen half done. The generation
// rises whenever the slot's bytes stop being what a lease or a ticket was given for.
struct SlotWord {
  SlotState state = SlotState::kFree;
  uint64_t generation = 0;

  uint64_t pack() const { return generation << 8 | static_cast<uint64_t>(state); }
  static SlotWord unpack(uint64_t word) { return {static_cast<SlotState>(word & 0xFF), word >> 8}; }
  bool operator==(const SlotWord&) const = default;
};

// Which slots hold the newest and the previous version: storing this one word is the commit. -1 is
// none. `sequence` counts commits, so that the word never returns to an earlier value.
struct NewestWord {
  int newest = -1;
  int previous = -1;
  uint64_t sequence = 0;

  uint64_t pack() const {
    return sequence << 8 | static_cast<uint64_t>(previous + 1) << 4 |
           static_cast<uint64_t>(newest + 1);
  }
  static NewestWord unpack(uint64_t word) {
    return {static_cast<int>(word & 0xF) - 1, static_cast<int>(word >> 4 & 0xF) - 1, word >> 8};
  }
  bool holds(size_t slot) const {
    return static_cast<int>(slot) == newest || static_cast<int>(slot) == previous;
  }
};

struct alignas(kPage) StoreHeader {
  std::atomic<uint64_t> magic;   // written last: without it the segment is not formatted
  uint64_t data_bytes;           // of one slot; all other sizes follow from it
  std::atomic<uint64_t> newest;  // NewestWord
  std::atomic<uint64_t> epoch;   // the youngest ever seen; older ones are refused
  // A hash of each reader's name, claimed with one compare-and-swap; 0 is unused. A name keeps its
  // index for good, so that a restarted process finds what its predecessor held.
  std::array<std::atomic<uint64_t>, kMaxClients> clients;
};

struct alignas(kPage) SlotHeader {
  std::atomic<uint64_t> word;  // SlotWord
  std::atomic<uint64_t> epoch;
  std::atomic<uint64_t> version;
  std::array<std::atomic<uint64_t>, 2> manifest_hash;
  std::atomic<uint64_t> written;   // bytes put since begin
  std::atomic<uint64_t> received;  // 1: begun for bytes that come from another node
  std::array<std::atomic<uint32_t>, kMaxClients> leases;
};

constexpr uint64_t chunks_of(uint64_t data_bytes) {
  return (data_bytes + kChunkBytes - 1) / kChunkBytes;
}

// Where the parts of a store stand, from the start of its memory.
struct Plan {
  explicit constexpr Plan(uint64_t data_bytes)
      : slot_stride(align_up(sizeof(SlotHeader) + chunks_of(data_bytes) * sizeof(uint64_t), kPage)),
        data(sizeof(StoreHeader) + kSlots * slot_stride),
        data_stride(align_up(data_bytes, kPage)),
        total(data + kSlots * data_stride) {}

  uint64_t slot(size_t index) const { return sizeof(StoreHeader) + index * slot_stride; }

  uint64_t slot_stride;  // a SlotHeader and the checksums that follow it
  uint64_t data;
  uint64_t data_stride;
  uint64_t total;
};

// The checksum of a chunk as it stands in the table; 0 means that it was not computed yet.
inline constexpr uint64_t kChecksumPresent = uint64_t{1} << 32;

}  // namespace psrl::weights
