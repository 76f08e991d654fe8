#include "weights/store.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/checksum.h"
#include "base/errors.h"

#ifdef __SANITIZE_THREAD__
// It does not model fences, and says so as a warning. Ours order bytes that other processes write,
// which it does not see either.
#pragma GCC diagnostic ignored "-Wtsan"
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace psrl::weights {
namespace {

// While it lives this thread reads bytes that may be written meanwhile, and learns of it afterwards
// (as with a seqlock): no race, though the race detector would say so.
struct Unwatched {
#ifdef __SANITIZE_THREAD__
  Unwatched() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~Unwatched() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#endif
};

// FNV-1a; never 0.
uint64_t client_id(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  return hash == 0 ? 1 : hash;
}

std::string described(uint64_t epoch, uint64_t version) {
  return "version " + std::to_string(version) + " of epoch " + std::to_string(epoch);
}

const char* name_of(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kWriting:
      return "being written";
    case SlotState::kSealed:
      return "sealed";
    case SlotState::kCommitted:
      return "committed";
  }
  return "damaged";
}

SlotWord word_of(const SlotHeader& slot) { return SlotWord::unpack(slot.word.load()); }

// One transition of a slot; false if it was not in `from` any more.
bool transition(SlotHeader& slot, SlotWord from, SlotWord to) {
  uint64_t expected = from.pack();
  return slot.word.compare_exchange_strong(expected, to.pack());
}

// Raises StorageError for a word that names a slot that does not exist.
NewestWord unpack_newest(uint64_t word) {
  const NewestWord visible = NewestWord::unpack(word);
  if (std::max(visible.newest, visible.previous) >= static_cast<int>(kSlots)) {
    throw StorageError("weights: the store's header is damaged");
  }
  return visible;
}

uint64_t present(uint32_t crc) { return kChecksumPresent | crc; }

// Raises StorageError unless all runs from `start` on, `stride` apart, lie in `size` bytes.
void require_inside(uint64_t start, uint64_t stride, const CopyRuns& copy, uint64_t size,
                    const char* whose) {
  uint64_t end = 0;
  const uint64_t last = copy.num > 0 ? copy.num - 1 : 0;
  if (__builtin_mul_overflow(last, stride, &end) || __builtin_add_overflow(end, start, &end) ||
      __builtin_add_overflow(end, copy.length, &end) || end > size ||
      (copy.length > 0 && copy.num > size)) {
    throw StorageError("weights: " + std::to_string(copy.num) + " x " +
                       std::to_string(copy.length) + " bytes from " + std::to_string(start) +
                       " on, " + std::to_string(stride) + " apart, are outside of " + whose + " " +
                       std::to_string(size));
  }
}

void require_aligned(ConstBytes memory) {
  if (reinterpret_cast<uintptr_t>(memory.data()) % kPage != 0) {
    throw StorageError("weights: the memory does not start at a page");
  }
}

// The chunk's index is the seed: a chunk that stands in another's place does not pass.
uint64_t checksum_of(ConstBytes bytes, uint64_t chunk) {
  return present(crc32c(bytes, static_cast<uint32_t>(chunk)));
}

}  // namespace

uint64_t WeightStore::required_bytes(uint64_t data_bytes) { return Plan(data_bytes).total; }

WeightStore::WeightStore(Bytes memory, uint64_t data_bytes, std::shared_ptr<const void> owner)
    : owner_(std::move(owner)),
      header_(reinterpret_cast<StoreHeader*>(memory.data())),
      data_bytes_(data_bytes),
      num_chunks_(chunks_of(data_bytes)) {
  const Plan plan(data_bytes);
  for (size_t i = 0; i < kSlots; ++i) {
    std::byte* base = memory.data() + plan.slot(i);
    slots_[i] = reinterpret_cast<SlotHeader*>(base);
    checksums_[i] = {reinterpret_cast<std::atomic<uint64_t>*>(base + sizeof(SlotHeader)),
                     num_chunks_};
    data_[i] = memory.subspan(plan.data + i * plan.data_stride, data_bytes);
  }
}

WeightStore WeightStore::format(Bytes memory, uint64_t data_bytes,
                                std::shared_ptr<const void> owner) {
  require_aligned(memory);
  if (data_bytes == 0) throw StorageError("weights: a store of 0 bytes");
  const Plan plan(data_bytes);
  if (memory.size() < plan.total || plan.total < data_bytes) {
    throw StorageError("weights: three versions of " + std::to_string(data_bytes) +
                       " bytes need a segment of " + std::to_string(plan.total) +
                       " bytes, it has " + std::to_string(memory.size()));
  }
  // Only the headers: the data's pages keep whatever they hold until a version is put there.
  auto* magic = reinterpret_cast<std::atomic<uint64_t>*>(memory.data());
  magic->store(0);
  std::memset(memory.data(), 0, plan.data);
  WeightStore store(memory, data_bytes, std::move(owner));
  store.header_->data_bytes = data_bytes;
  store.header_->magic.store(kMagic);
  return store;
}

WeightStore WeightStore::open(Bytes memory, std::shared_ptr<const void> owner) {
  if (memory.size() < sizeof(StoreHeader)) throw StorageError("weights: the segment is too small");
  require_aligned(memory);
  const auto* header = reinterpret_cast<const StoreHeader*>(memory.data());
  if (header->magic.load() != kMagic) {
    throw StorageError("weights: the segment is not formatted as a weight store");
  }
  const uint64_t data_bytes = header->data_bytes;
  if (data_bytes == 0 || data_bytes > memory.size() || Plan(data_bytes).total > memory.size()) {
    throw StorageError("weights: the header says " + std::to_string(data_bytes) +
                       " bytes a version, the segment has " + std::to_string(memory.size()));
  }
  return {memory, data_bytes, std::move(owner)};
}

// --- Writing -------------------------------------------------------------------------------------

void WeightStore::refuse_stale(uint64_t epoch) const {
  const uint64_t current = header_->epoch.load();
  if (epoch < current) {
    throw StaleMessage("weights: epoch " + std::to_string(epoch) +
                       " is over, the run is in epoch " + std::to_string(current));
  }
}

void WeightStore::refuse_gap(uint64_t epoch, uint64_t version, Follows follows) const {
  const std::optional<Committed> last = newest();
  if (!last || last->epoch != epoch) return;
  const bool follow =
      follows == Follows::kNext ? version == last->version + 1 : version > last->version;
  if (!follow) {
    throw StorageError("weights: " + described(epoch, version) + " does not follow version " +
                       std::to_string(last->version));
  }
}

void WeightStore::fence(uint64_t epoch) {
  uint64_t current = header_->epoch.load();
  while (current < epoch && !header_->epoch.compare_exchange_weak(current, epoch)) {
  }
}

Ticket WeightStore::begin(uint64_t epoch, uint64_t version, const ManifestHash& manifest_hash,
                          Follows follows) {
  refuse_stale(epoch);
  refuse_gap(epoch, version, follows);
  fence(epoch);
  const NewestWord visible = unpack_newest(header_->newest.load());
  int chosen = -1;
  bool chosen_free = false;
  for (uint32_t i = 0; i < kSlots; ++i) {
    if (visible.holds(i)) continue;
    const SlotWord word = word_of(*slots_[i]);
    const bool unfinished = word.state == SlotState::kWriting || word.state == SlotState::kSealed;
    if (unfinished && slots_[i]->epoch.load() >= epoch) {
      throw StorageError("weights: slot " + std::to_string(i) + " is " + name_of(word.state) +
                         " with " + described(slots_[i]->epoch, slots_[i]->version) +
                         "; commit or abandon it first");
    }
    // A free one first; else the oldest, as the newest and the one before it are left out.
    const bool free = word.state == SlotState::kFree;
    if (chosen < 0 || (free && !chosen_free)) {
      chosen = static_cast<int>(i);
      chosen_free = free;
    }
  }
  SlotHeader& slot = *slots_[chosen];
  const SlotWord from = word_of(slot);
  const SlotWord to{SlotState::kWriting, from.generation + 1};  // revokes leases and old tickets
  if (!transition(slot, from, to)) {
    throw StorageError("weights: another writer began a version at the same time");
  }
  // Whoever sees a byte written from here on also sees the new generation, and so knows that its
  // copy is torn. A store alone does not keep the plain writes of `put` behind it.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  slot.epoch.store(epoch);
  slot.version.store(version);
  slot.manifest_hash[0].store(manifest_hash[0]);
  slot.manifest_hash[1].store(manifest_hash[1]);
  slot.written.store(0);
  slot.received.store(follows == Follows::kAny ? 1 : 0);
  for (auto& count : slot.leases) count.store(0);
  for (auto& sum : checksums_[chosen]) sum.store(0);
  return {static_cast<uint32_t>(chosen), to.generation};
}

void WeightStore::require_ticket(const Ticket& ticket) const {
  require_slot(ticket.slot);
  const SlotWord word = word_of(*slots_[ticket.slot]);
  if (word.generation != ticket.generation) {
    throw Revoked("weights: slot " + std::to_string(ticket.slot) + " was taken from its writer");
  }
  if (word.state != SlotState::kWriting) {
    throw StorageError("weights: slot " + std::to_string(ticket.slot) + " is " +
                       name_of(word.state) + ", nothing can be written to it");
  }
}

void WeightStore::put(const Ticket& ticket, uint64_t offset, ConstBytes bytes) {
  const CopyRuns copy{.into = offset, .length = bytes.size()};
  put(ticket, bytes, {&copy, 1});
}

void WeightStore::put(const Ticket& ticket, ConstBytes from, std::span<const CopyRuns> copies) {
  require_ticket(ticket);
  uint64_t num_bytes = 0;
  for (const CopyRuns& copy : copies) {
    require_inside(copy.offset, copy.stride, copy, from.size(), "the bytes given");
    require_inside(copy.into, copy.into_stride, copy, data_bytes(), "a version's");
    num_bytes += copy.num * copy.length;
  }
  std::byte* into = data(ticket.slot).data();
  for (const CopyRuns& copy : copies) {
    if (copy.length == 0) continue;
    for (uint64_t i = 0; i < copy.num; ++i) {
      std::memcpy(into + copy.into + i * copy.into_stride,
                  from.data() + copy.offset + i * copy.stride, copy.length);
    }
  }
  slots_[ticket.slot]->written.fetch_add(num_bytes);
  require_ticket(ticket);
}

Bytes WeightStore::memory(const Ticket& ticket) const {
  require_ticket(ticket);
  return data(ticket.slot);
}

uint64_t WeightStore::memory_offset(uint32_t slot) const {
  require_slot(slot);
  return static_cast<uint64_t>(data(slot).data() - reinterpret_cast<std::byte*>(header_));
}

void WeightStore::arrived(const Ticket& ticket, uint64_t num_bytes,
                          std::span<const uint32_t> sums) {
  require_ticket(ticket);
  if (!sums.empty() && sums.size() != num_chunks_) {
    throw StorageError("weights: " + std::to_string(sums.size()) + " checksums for " +
                       std::to_string(num_chunks_) + " chunks");
  }
  slots_[ticket.slot]->written.fetch_add(num_bytes);
  for (uint64_t i = 0; i < sums.size(); ++i) checksums_[ticket.slot][i].store(present(sums[i]));
}

void WeightStore::checksum(const Ticket& ticket, uint64_t first, uint64_t count) {
  require_ticket(ticket);
  require_chunks(first, count);
  for (uint64_t i = first; i < first + count; ++i) {
    checksums_[ticket.slot][i].store(checksum_of(chunk(ticket.slot, i), i));
  }
  require_ticket(ticket);
}

void WeightStore::seal(const Ticket& ticket, uint64_t expected_bytes) {
  require_ticket(ticket);
  SlotHeader& slot = *slots_[ticket.slot];
  if (slot.written.load() != expected_bytes) {
    throw StorageError("weights: " + described(slot.epoch, slot.version) + " has " +
                       std::to_string(slot.written) + " bytes put, its manifest " +
                       std::to_string(expected_bytes) + ": a tensor is missing or was put twice");
  }
  for (uint64_t i = 0; i < num_chunks_; ++i) {
    if (checksums_[ticket.slot][i].load() == 0) checksum(ticket, i, 1);
  }
  if (!transition(slot, {SlotState::kWriting, ticket.generation},
                  {SlotState::kSealed, ticket.generation})) {
    require_ticket(ticket);
  }
}

void WeightStore::abandon(uint32_t index) {
  require_slot(index);
  SlotHeader& slot = *slots_[index];
  const SlotWord word = word_of(slot);
  if (word.state == SlotState::kFree) return;
  if (word.state == SlotState::kCommitted ||
      !transition(slot, word, {SlotState::kFree, word.generation + 1})) {
    throw StorageError("weights: slot " + std::to_string(index) + " is committed with " +
                       described(slot.epoch, slot.version));
  }
}

// --- Committing ----------------------------------------------------------------------------------

std::optional<Committed> WeightStore::newest() const {
  for (;;) {
    const uint64_t word = header_->newest.load();
    const NewestWord visible = unpack_newest(word);
    if (visible.newest < 0) return std::nullopt;
    const SlotHeader& slot = *slots_[visible.newest];
    const Committed found{slot.epoch.load(), slot.version.load(),
                          static_cast<uint32_t>(visible.newest)};
    if (header_->newest.load() == word) return found;
  }
}

void WeightStore::commit(uint64_t epoch, uint64_t version, uint32_t index, Follows follows) {
  require_slot(index);
  refuse_stale(epoch);
  SlotHeader& slot = *slots_[index];
  const SlotWord word = word_of(slot);
  uint64_t current = header_->newest.load();
  const NewestWord visible = unpack_newest(current);
  const bool same = slot.epoch.load() == epoch && slot.version.load() == version;
  if (same && visible.newest == static_cast<int>(index)) return;  // said twice
  if (!same || (word.state != SlotState::kSealed && word.state != SlotState::kCommitted) ||
      visible.holds(index)) {
    throw StorageError("weights: cannot commit " + described(epoch, version) + ": slot " +
                       std::to_string(index) + " is " + name_of(word.state) + " with " +
                       described(slot.epoch, slot.version));
  }
  refuse_gap(epoch, version, follows);
  // A head killed between these two leaves a committed slot that is not visible: the same commit
  // said again finishes it, and the next begin may take the slot.
  if (word.state == SlotState::kSealed &&
      !transition(slot, word, {SlotState::kCommitted, word.generation})) {
    throw StorageError("weights: slot " + std::to_string(index) + " changed during its commit");
  }
  fence(epoch);
  const NewestWord next{static_cast<int>(index), visible.newest, visible.sequence + 1};
  if (!header_->newest.compare_exchange_strong(current, next.pack())) {
    throw StorageError("weights: two processes commit; only the head may");
  }
}

// --- Reading -------------------------------------------------------------------------------------

uint32_t WeightStore::client_index(std::string_view client) {
  const uint64_t id = client_id(client);
  for (uint32_t i = 0; i < kMaxClients; ++i) {
    uint64_t found = header_->clients[i].load();
    if (found == 0 && header_->clients[i].compare_exchange_strong(found, id)) return i;
    if (found == id) return i;
  }
  throw StorageError("weights: more than " + std::to_string(kMaxClients) +
                     " readers; no place for " + std::string(client));
}

std::optional<Lease> WeightStore::acquire(std::string_view client, uint64_t min_version,
                                          uint64_t min_epoch) {
  const uint32_t index = client_index(client);
  for (;;) {
    const uint64_t word = header_->newest.load();
    const NewestWord visible = unpack_newest(word);
    if (visible.newest < 0) return std::nullopt;
    SlotHeader& slot = *slots_[visible.newest];
    const Lease lease{.slot = static_cast<uint32_t>(visible.newest),
                      .generation = word_of(slot).generation,
                      .epoch = slot.epoch.load(),
                      .version = slot.version.load(),
                      .manifest_hash = {slot.manifest_hash[0].load(), slot.manifest_hash[1].load()},
                      .client = index};
    const bool wanted = lease.version >= min_version && lease.epoch >= min_epoch;
    if (wanted) slot.leases[index].fetch_add(1);
    // All of the above is of one version if that version is still the newest one.
    if (header_->newest.load() == word) return wanted ? std::optional(lease) : std::nullopt;
    if (wanted) release(lease);
  }
}

bool WeightStore::valid(const Lease& lease) const {
  // Reads of the slot's bytes come before the read of its generation.
  std::atomic_thread_fence(std::memory_order_acquire);
  return word_of(*slots_.at(lease.slot)).generation == lease.generation;
}

void WeightStore::release(const Lease& lease) {
  if (!valid(lease)) return;
  // Never below zero: the slot may be taken, and its counts cleared, at this very moment.
  std::atomic<uint32_t>& count = slots_[lease.slot]->leases.at(lease.client);
  uint32_t held = count.load();
  while (held > 0 && !count.compare_exchange_weak(held, held - 1)) {
  }
}

uint64_t WeightStore::release_client(std::string_view client) {
  const uint64_t id = client_id(client);
  const auto found = std::ranges::find_if(
      header_->clients, [&](const std::atomic<uint64_t>& entry) { return entry.load() == id; });
  if (found == header_->clients.end()) return 0;
  uint64_t held = 0;
  for (SlotHeader* slot : slots_) {
    held += slot->leases[static_cast<size_t>(found - header_->clients.begin())].exchange(0);
  }
  return held;
}

void WeightStore::throw_revoked(const Lease& lease) const {
  throw Revoked("weights: the lease on " + described(lease.epoch, lease.version) +
                " was taken back, start again on the newest version");
}

void WeightStore::compare(const Lease& lease, uint64_t index, ConstBytes bytes) const {
  [[maybe_unused]] const Unwatched unwatched;
  const uint64_t sum = checksum_of(bytes, index);
  const uint64_t expected = checksums_[lease.slot][index].load();
  if (!valid(lease)) throw_revoked(lease);  // asked last: a torn copy is no damage
  if (sum != expected) {
    throw ChecksumMismatch("weights: " + described(lease.epoch, lease.version) + ", slot " +
                           std::to_string(lease.slot) + ": chunk " + std::to_string(index) +
                           " of " + std::to_string(num_chunks_) + " is not what was sealed");
  }
}

void WeightStore::copy_chunks(const Lease& lease, uint64_t first, uint64_t count,
                              Bytes into) const {
  require_slot(lease.slot);
  require_chunks(first, count);
  const uint64_t start = std::min(first * kChunkBytes, data_bytes());
  const uint64_t length = std::min((first + count) * kChunkBytes, data_bytes()) - start;
  if (into.size() != length) {
    throw StorageError("weights: " + std::to_string(count) + " chunks have " +
                       std::to_string(length) + " bytes, the buffer has " +
                       std::to_string(into.size()));
  }
  for (uint64_t i = first; i < first + count; ++i) {
    const ConstBytes from = chunk(lease.slot, i);
    const Bytes to = into.subspan(i * kChunkBytes - start, from.size());
    {
      [[maybe_unused]] const Unwatched unwatched;
      std::memcpy(to.data(), from.data(), from.size());
    }
    compare(lease, i, to);  // of the copy, while it is in the cache
  }
}

std::vector<uint32_t> WeightStore::checksums(uint32_t slot) const {
  require_slot(slot);
  const SlotState state = word_of(*slots_[slot]).state;
  if (state != SlotState::kSealed && state != SlotState::kCommitted) {
    throw StorageError("weights: slot " + std::to_string(slot) + " is " + name_of(state) +
                       "; it has no checksums yet");
  }
  std::vector<uint32_t> sums;
  sums.reserve(num_chunks_);
  for (const auto& sum : checksums_[slot]) sums.push_back(static_cast<uint32_t>(sum.load()));
  return sums;
}

void WeightStore::verify(const Lease& lease) const {
  require_slot(lease.slot);
  for (uint64_t i = 0; i < num_chunks_; ++i) compare(lease, i, chunk(lease.slot, i));
}

void WeightStore::verify_chunk(const Lease& lease, uint64_t index) const {
  require_slot(lease.slot);
  require_chunks(index, 1);
  compare(lease, index, chunk(lease.slot, index));
}

ConstBytes WeightStore::view(const Lease& lease) const {
  require_slot(lease.slot);
  if (!valid(lease)) throw_revoked(lease);
  return data(lease.slot);
}

std::array<SlotInfo, kSlots> WeightStore::slots() const {
  const NewestWord visible = unpack_newest(header_->newest.load());
  std::array<SlotInfo, kSlots> infos;
  for (size_t i = 0; i < kSlots; ++i) {
    const SlotHeader& slot = *slots_[i];
    const SlotWord word = word_of(slot);
    infos[i] = {word.state,
                word.generation,
                slot.epoch,
                slot.version,
                slot.written,
                0,
                visible.newest == static_cast<int>(i),
                slot.received != 0};
    for (const auto& count : slot.leases) infos[i].leases += count.load();
  }
  return infos;
}

Bytes WeightStore::chunk(uint32_t slot, uint64_t index) const {
  const uint64_t start = index * kChunkBytes;
  return data(slot).subspan(start, std::min(kChunkBytes, data_bytes() - start));
}

void WeightStore::require_slot(uint32_t slot) const {
  if (slot >= kSlots) throw StorageError("weights: no slot " + std::to_string(slot));
}

void WeightStore::require_chunks(uint64_t first, uint64_t count) const {
  if (first > num_chunks_ || count > num_chunks_ - first) {
    throw StorageError("weights: no chunks " + std::to_string(first) + " + " +
                       std::to_string(count) + " of " + std::to_string(num_chunks_));
  }
}

}  // namespace psrl::weights
