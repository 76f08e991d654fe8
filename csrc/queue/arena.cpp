#include "queue/arena.h"

#include "base/errors.h"

namespace psrl {
namespace {

constexpr uint64_t kPage = 4096;

struct Places {
  uint64_t clients;
  uint64_t extents;
  uint64_t leases;
  uint64_t data;
};

Places places(uint64_t num_extents, uint64_t max_clients) {
  Places at{};
  at.clients = align_up(sizeof(ArenaHeader), 128);
  at.extents = at.clients + max_clients * sizeof(ClientEntry);
  at.leases = at.extents + num_extents * sizeof(ExtentEntry);
  at.data = align_up(at.leases + max_clients * num_extents * sizeof(LeaseWord), kPage);
  return at;
}

ArenaHeader* header_of(Segment& segment) {
  return reinterpret_cast<ArenaHeader*>(segment.bytes(0, sizeof(ArenaHeader)).data());
}

// Whether what a header says can be: nothing empty, nothing beyond the segment, no sum that wraps.
bool fits(const Geometry& said, uint64_t segment_bytes) {
  if (said.extent_bytes == 0 || said.extent_bytes % kPage != 0 || said.num_extents == 0 ||
      said.num_extents > UINT32_MAX || said.max_clients == 0) {
    return false;
  }
  // Each of these alone must be below the size before their sum can be trusted not to wrap.
  const uint64_t per_extent = sizeof(ExtentEntry) + said.max_clients * sizeof(LeaseWord);
  if (said.extent_bytes > segment_bytes / said.num_extents ||
      per_extent > segment_bytes / said.num_extents ||
      said.max_clients > segment_bytes / sizeof(ClientEntry)) {
    return false;
  }
  return Arena::segment_bytes(said.num_extents, said.extent_bytes, said.max_clients) <=
         segment_bytes;
}

}  // namespace

uint64_t Arena::segment_bytes(uint64_t num_extents, uint64_t extent_bytes, uint32_t max_clients) {
  return places(num_extents, max_clients).data + num_extents * extent_bytes;
}

Arena::Arena(std::shared_ptr<Segment> segment, const Geometry& geometry)
    : segment_(std::move(segment)),
      extent_bytes_(geometry.extent_bytes),
      num_extents_(static_cast<uint32_t>(geometry.num_extents)),
      max_clients_(geometry.max_clients) {
  const Places at = places(num_extents_, max_clients_);
  std::byte* base = segment_->bytes().data();
  clients_ = reinterpret_cast<ClientEntry*>(base + at.clients);
  extents_ = reinterpret_cast<ExtentEntry*>(base + at.extents);
  leases_ = reinterpret_cast<LeaseWord*>(base + at.leases);
  data_ = base + at.data;
}

std::shared_ptr<Arena> Arena::format(std::shared_ptr<Segment> segment, uint64_t extent_bytes,
                                     uint32_t max_clients) {
  if (extent_bytes == 0 || extent_bytes % kPage != 0) {
    throw StorageError("transfer_queue.extent_bytes must be a multiple of 4096, not " +
                       std::to_string(extent_bytes));
  }
  if (is_formatted(*segment)) throw StorageError("segment " + segment->name() + " is in use");
  const uint64_t each = extent_bytes + sizeof(ExtentEntry) + max_clients * sizeof(LeaseWord);
  uint64_t num_extents = segment->size() / each;
  while (num_extents > 0 &&
         segment_bytes(num_extents, extent_bytes, max_clients) > segment->size()) {
    --num_extents;
  }
  if (num_extents == 0 || num_extents > UINT32_MAX || max_clients == 0) {
    throw StorageError("segment " + segment->name() + " of " + std::to_string(segment->size()) +
                       " bytes holds no extent of " + std::to_string(extent_bytes) +
                       "; raise transfer_queue.arena_bytes");
  }
  auto* header = header_of(*segment);
  header->extent_bytes = extent_bytes;
  header->num_extents = num_extents;
  header->max_clients = max_clients;
  // All tables start as zeroes: extents FREE of generation 0, no client, no lease.
  header->magic.store(kArenaMagic, std::memory_order_release);
  return std::shared_ptr<Arena>(
      new Arena(std::move(segment), {extent_bytes, num_extents, max_clients}));
}

bool Arena::is_formatted(const Segment& segment) {
  const ConstBytes bytes = segment.const_bytes();
  return bytes.size() >= sizeof(ArenaHeader) &&
         reinterpret_cast<const ArenaHeader*>(bytes.data())->magic.load() == kArenaMagic;
}

std::shared_ptr<Arena> Arena::open(std::shared_ptr<Segment> segment) {
  if (!is_formatted(*segment)) {
    throw StorageError("segment " + segment->name() + " holds no queue (yet)");
  }
  const ArenaHeader& header = *header_of(*segment);
  const Geometry said{header.extent_bytes, header.num_extents, header.max_clients};
  if (!fits(said, segment->size())) {
    throw StorageError("segment " + segment->name() + ": its queue says more than it holds");
  }
  return std::shared_ptr<Arena>(new Arena(std::move(segment), said));
}

Bytes Arena::data(uint32_t index, uint32_t run) const {
  if (index >= num_extents() || run > num_extents() - index) {
    throw StorageError("extent " + std::to_string(index) + " is not in the arena");
  }
  return {data_ + index * extent_bytes_, run * extent_bytes_};
}

void Arena::check_client(ClientId client) const {
  if (client.number >= max_clients() ||
      clients_[client.number].incarnation.load() != client.incarnation) {
    throw Revoked("queue client " + std::to_string(client.number) +
                  " was released: its process counts as dead");
  }
}

// Leases against reclaim (Dekker's pattern, all operations sequentially consistent):
//
//   reader:  add 1 to its lease word;           then load the extent's word
//   manager: store generation + 1 in the word;  then load all lease words
//
// In the single order of these four, either the reader's load comes after the manager's store, and
// the reader sees the new generation and backs out; or the manager's loads come after the reader's
// add, and the manager sees the lease and leaves the extent DRAINING. So no extent is handed on
// while a reader that succeeded still looks at it. With weaker orders both could miss each other.
Lease::Lease(std::shared_ptr<Arena> arena, ClientId client, uint32_t extent, uint64_t generation)
    : arena_(std::move(arena)), client_(client), extent_(extent) {
  arena_->data(extent);  // checks the index
  arena_->check_client(client);
  LeaseWord& word = arena_->lease_word(client.number, extent);
  uint64_t seen = word.load();
  do {
    if (seen >> 32 != client.incarnation) {
      throw Revoked("queue client " + std::to_string(client.number) + " was released");
    }
  } while (!word.compare_exchange_weak(seen, seen + 1));

  const uint64_t state = arena_->extent(extent).word.load();
  if (generation_of(state) != generation ||
      (state_of(state) != ExtentState::kGranted && state_of(state) != ExtentState::kSealed)) {
    give_back();
    throw UnknownKey("extent " + std::to_string(extent) + " of generation " +
                     std::to_string(generation) + " was given back: the row is cleared");
  }
}

void Lease::give_back() {
  LeaseWord& word = arena_->lease_word(client_.number, extent_);
  uint64_t seen = word.load();
  do {
    // Released by the manager meanwhile: nothing of ours is counted any more.
    if (seen >> 32 != client_.incarnation || (seen & 0xFFFFFFFF) == 0) return;
  } while (!word.compare_exchange_weak(seen, seen - 1));
}

}  // namespace psrl
