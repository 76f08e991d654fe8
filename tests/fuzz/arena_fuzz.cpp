// The tables of a queue's arena and the headers of its records, whatever was written there: the
// manager that finds them, and readers, stay within the arena.
#include <algorithm>
#include <cstring>

#include "base/errors.h"
#include "fuzz.h"
#include "queue/arena.h"
#include "queue/manager.h"
#include "queue/reader.h"
#include "queue/writer.h"

namespace psrl::fuzz {
namespace {

constexpr uint64_t kExtent = 4096, kNumExtents = 3;
constexpr uint32_t kClients = 2;

// What an input replaces: the arena's tables, and the beginning of the first extent.
constexpr size_t kTables = 768, kRecords = 768;

std::shared_ptr<Segment> new_segment() {
  return Segment::create("queue", Arena::segment_bytes(kNumExtents, kExtent, kClients),
                         "transfer_queue.arena_bytes");
}

// Two rows of one writer, a third begun, a reader with a lease.
std::string filled() {
  const auto segment = new_segment();
  const auto arena = Arena::format(segment, kExtent, kClients);
  ArenaManager manager(arena);
  const ClientId alice = manager.register_client("alice");
  QueueWriter writer(arena, alice);
  writer.add(manager.grant(alice, 1, 1, {}));
  std::vector<PendingRecord> pending;
  for (const char* key : {"a", "b", "c"}) {
    Description row{"train", key, "tag", {{"x", "<i8", {4}}}};
    const uint64_t length = plan_record(row);
    const std::vector<int64_t> x(4, 7);
    const PlannedRecord planned{row, length, {std::as_bytes(std::span(x))}};
    writer.begin(std::span(&planned, 1), pending);
  }
  require(pending.size() == 3);
  pending[0].commit();
  const RecordRef second = pending[1].commit();
  const QueueReader reader(arena, manager.register_client("bob"));
  const RecordView view = reader.read(second);
  return text_of(segment->const_bytes());
}

const std::string& good_arena() {
  static const std::string arena = filled();
  return arena;
}

template <class Work>
void attempt(Work work) {
  try {
    work();
  } catch (const StorageError&) {
  }
}

bool inside(const RecordRef& ref) {
  const uint64_t room = (kNumExtents - ref.extent) * kExtent;
  return ref.extent < kNumExtents && ref.offset <= room && ref.length <= room - ref.offset;
}

void use(ArenaManager& manager, const std::shared_ptr<Arena>& arena) {
  attempt([&] { manager.usage(); });
  attempt([&] { manager.register_client("carol"); });
  attempt([&] {
    const QueueReader reader(arena, manager.register_client("bob"));
    for (const RecordInfo& record : manager.scan()) {
      require(inside(record.ref));
      attempt([&] {
        const RecordView view = reader.read(record.ref);
        for (const Field& field : view.description.fields) {
          require(field.offset + field.nbytes <= view.bytes.size());
        }
      });
      attempt([&] { manager.free(record.ref); });
    }
  });
  attempt([&] { manager.release_client("alice"); });
  attempt([&] {
    const ClientId client = manager.register_client("alice");
    for (const Grant& grant : manager.grant(client, kExtent + 1, 1, {})) {
      require(grant.extent < kNumExtents && grant.run <= kNumExtents - grant.extent);
    }
  });
}

}  // namespace

std::vector<std::string> seeds() {
  const std::string& arena = good_arena();
  const size_t data = arena.size() - kNumExtents * kExtent;
  return {arena.substr(0, kTables) + arena.substr(data, kRecords)};
}

void feed(std::string_view input) {
  static const auto segment = new_segment();
  const Bytes memory = segment->bytes();
  const std::string& good = good_arena();
  std::memcpy(memory.data(), good.data(), good.size());
  const std::string_view tables = input.substr(0, kTables);
  std::memcpy(memory.data(), tables.data(), tables.size());
  const std::string_view records = input.substr(tables.size()).substr(0, kRecords);
  std::memcpy(memory.data() + good.size() - kNumExtents * kExtent, records.data(), records.size());
  attempt([&] {
    const auto arena = Arena::open(segment);
    require(arena->capacity() <= segment->size());
    if (arena->num_extents() != kNumExtents) return;
    ArenaManager manager(arena);
    use(manager, arena);
  });
}

}  // namespace psrl::fuzz
