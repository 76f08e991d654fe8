// Versions of the weights in one segment: three slots, one of them written while two are read.
//
// Who calls what: one trainer rank begins a version and hands the ticket to the others; every rank
// puts its ranges; when all have, checksums are computed and one rank seals. The head alone
// commits. Readers acquire a lease on the newest version, copy, and release. On a node that gets
// versions from others its server begins (kAny), receives units straight into the slot
// (weights/relay.h), seals and commits.
//
// Invariants:
// - A version is visible from its commit on, which is one store of one word; a process killed at
//   any point leaves the version before it whole and newest.
// - `begin` never touches the newest version nor the one before it, so it waits for nobody: a lease
//   on V - 1 stays good while V + 1 is written, one on anything older is revoked by raising the
//   generation of the slot that is taken. A reader learns of it after its copy (as with a seqlock).
// - Checksums are computed once, before the seal, over whole chunks of the slot. Not while putting:
//   a chunk holds the bytes of several tensors and ranks, so it has no checksum before the last of
//   them is there, and a sum that could be combined from parts would be a weak one. The price is
//   one more pass at memory speed, which ranks can share. A count of the bytes put tells a tensor
//   that was left out or written twice.
// - Every number in the segment may be read by anyone at any time; only the words documented in
//   layout.h decide anything.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "weights/layout.h"

namespace psrl::weights {

// A message of an older epoch of the run.
class StaleMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using ManifestHash = std::array<uint64_t, 2>;

// The right to write one slot, good for as long as the slot's generation.
struct Ticket {
  uint32_t slot = 0;
  uint64_t generation = 0;
};

// Whether a version must follow the newest one of its epoch without a gap, as the trainer's do, or
// may be any newer one, as on a node that was away for a while.
enum class Follows : uint8_t { kNext, kAny };

// `num` runs of `length` bytes, from `offset + i * stride` of some bytes to `into + i *
// into_stride` of a version.
struct CopyRuns {
  uint64_t offset = 0;
  uint64_t into = 0;
  uint64_t length = 0;
  uint64_t num = 1;
  uint64_t stride = 0;
  uint64_t into_stride = 0;
};

// A reader's hold on one version. Says what it was given for; `WeightStore::valid` says if it is.
struct Lease {
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t epoch = 0;
  uint64_t version = 0;
  ManifestHash manifest_hash{};
  uint32_t client = 0;
};

struct SlotInfo {
  SlotState state = SlotState::kFree;
  uint64_t generation = 0;
  uint64_t epoch = 0;
  uint64_t version = 0;
  uint64_t written = 0;
  uint32_t leases = 0;
  bool newest = false;
};

struct Committed {
  uint64_t epoch = 0;
  uint64_t version = 0;
  uint32_t slot = 0;
};

class WeightStore {
 public:
  // The bytes that a segment needs for three versions of `data_bytes` each.
  static uint64_t required_bytes(uint64_t data_bytes);

  // Makes an empty store in `memory`, whatever it held. `owner` keeps the memory alive.
  static WeightStore format(Bytes memory, uint64_t data_bytes, std::shared_ptr<const void> owner);
  // Finds the store that is there. Raises StorageError if there is none or it does not fit.
  static WeightStore open(Bytes memory, std::shared_ptr<const void> owner);

  uint64_t data_bytes() const { return data_bytes_; }
  uint64_t num_chunks() const { return num_chunks_; }

  // Refuses everything of epochs before `epoch` from now on. Idempotent.
  void fence(uint64_t epoch);

  // A slot to write `version` into. Takes over what writers of older epochs left unfinished. Raises
  // StaleMessage for an older epoch, StorageError if the version does not follow or if a version of
  // the same epoch is being written (abandon it first). Writers of an older epoch must be dead by
  // then, or at least past their last `put`.
  Ticket begin(uint64_t epoch, uint64_t version, const ManifestHash& manifest_hash,
               Follows follows = Follows::kNext);
  // Copies `bytes` to `offset` of the slot. Ranks may put disjoint ranges at the same time; each
  // byte is put once. Raises Revoked when the slot was taken away.
  void put(const Ticket& ticket, uint64_t offset, ConstBytes bytes);
  void put(const Ticket& ticket, ConstBytes from, std::span<const CopyRuns> copies);
  // The slot's memory, for bytes that arrive by themselves, and where it begins in the segment's.
  // `arrived` counts them, and notes the checksum of a chunk that came whole and was compared.
  Bytes memory(const Ticket& ticket) const;
  uint64_t memory_offset(uint32_t slot) const;
  void arrived(const Ticket& ticket, uint64_t num_bytes);
  void arrived(const Ticket& ticket, uint64_t chunk, uint32_t crc);
  // Computes the checksums of `count` chunks from `first` on, when all of their bytes are there.
  void checksum(const Ticket& ticket, uint64_t first, uint64_t count);
  // Closes the slot: computes the checksums that are missing. Raises StorageError unless exactly
  // `expected_bytes` were put.
  void seal(const Ticket& ticket, uint64_t expected_bytes);
  // Frees a slot that was begun and not committed, whoever holds its ticket. Idempotent.
  void abandon(uint32_t slot);

  // Makes the sealed version in `slot` the newest one. Idempotent. Raises StaleMessage for an older
  // epoch, StorageError for a slot that holds something else or a version that does not follow (the
  // first of an epoch may be any: a run resumes at its checkpoint).
  void commit(uint64_t epoch, uint64_t version, uint32_t slot, Follows follows = Follows::kNext);
  std::optional<Committed> newest() const;

  // A lease on the newest version, none if it is older than asked for.
  std::optional<Lease> acquire(std::string_view client, uint64_t min_version,
                               uint64_t min_epoch = 0);
  bool valid(const Lease& lease) const;
  // Gives a lease back; nothing happens to one that was revoked.
  void release(const Lease& lease);
  // Gives back all leases of a process that died. Returns how many there were.
  uint64_t release_client(std::string_view client);

  // Copies whole chunks out, `into` being what `chunk_range(first, count)` says, and compares their
  // checksums. Raises Revoked or ChecksumMismatch; `into` is then garbage.
  void copy_chunks(const Lease& lease, uint64_t first, uint64_t count, Bytes into) const;
  // The checksum of each chunk of a sealed or committed slot. Raises StorageError for others.
  std::vector<uint32_t> checksums(uint32_t slot) const;
  // The same comparison in place.
  void verify(const Lease& lease) const;
  void verify_chunk(const Lease& lease, uint64_t chunk) const;
  // The leased bytes themselves. Whoever reads them asks `valid` afterwards.
  ConstBytes view(const Lease& lease) const;

  std::array<SlotInfo, kSlots> slots() const;

 private:
  WeightStore(Bytes memory, uint64_t data_bytes, std::shared_ptr<const void> owner);

  void refuse_stale(uint64_t epoch) const;
  void refuse_gap(uint64_t epoch, uint64_t version, Follows follows) const;
  void require_ticket(const Ticket& ticket) const;
  [[noreturn]] void throw_revoked(const Lease& lease) const;
  void compare(const Lease& lease, uint64_t chunk, ConstBytes bytes) const;
  uint32_t client_index(std::string_view client);
  Bytes data(uint32_t slot) const { return data_[slot]; }
  Bytes chunk(uint32_t slot, uint64_t index) const;
  void require_slot(uint32_t slot) const;
  void require_chunks(uint64_t first, uint64_t count) const;

  std::shared_ptr<const void> owner_;
  StoreHeader* header_ = nullptr;
  uint64_t data_bytes_ = 0;  // as the header said when it was checked
  uint64_t num_chunks_ = 0;
  std::array<SlotHeader*, kSlots> slots_{};
  std::array<std::span<std::atomic<uint64_t>>, kSlots> checksums_;
  std::array<Bytes, kSlots> data_;
};

}  // namespace psrl::weights
