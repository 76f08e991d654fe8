#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "base/dtype.h"
#include "base/errors.h"
#include "queue/manager.h"
#include "queue/packing.h"
#include "queue/reader.h"
#include "queue/writer.h"

namespace psrl {
namespace {

constexpr uint64_t kExtent = 16 * 1024;

// An arena with its manager; clients map the segment again, as another process would.
struct Node {
  explicit Node(uint64_t num_extents = 8)
      : segment(Segment::create("queue", Arena::segment_bytes(num_extents, kExtent, 8), "key")),
        arena(Arena::format(segment, kExtent, 8)),
        manager(std::make_unique<ArenaManager>(arena)) {}

  std::shared_ptr<Arena> map() const { return Arena::open(Segment::attach(segment->fd())); }

  std::shared_ptr<Segment> segment;
  std::shared_ptr<Arena> arena;
  std::unique_ptr<ArenaManager> manager;
};

Description row(const std::string& key, uint64_t num_values) {
  return {"train", key, "tag of " + key, {{"x", "<i8", {num_values}}, {"n", "<f4", {}}}};
}

std::optional<PendingRecord> begin_one(QueueWriter& writer, const PlannedRecord& planned) {
  std::vector<PendingRecord> pending;
  writer.begin(std::span(&planned, 1), pending);
  if (pending.empty()) return std::nullopt;
  return std::move(pending[0]);
}

// Whoever writes rows: values of "x" are all `value`.
struct Writer {
  Writer(Node& node, const std::string& name)
      : node(node), client(node.manager->register_client(name)), writer(node.map(), client) {}

  std::optional<PendingRecord> begin(const std::string& key, int64_t value, uint64_t num_values) {
    Description description = row(key, num_values);
    const uint64_t length = plan_record(description);
    const std::vector<int64_t> x(num_values, value);
    const float n = 1.0f;
    const PlannedRecord planned{
        description, length, {std::as_bytes(std::span(x)), std::as_bytes(std::span(&n, 1))}};
    auto pending = begin_one(writer, planned);
    if (!pending) {
      writer.add(node.manager->grant(client, length, 2, writer.held()));
      pending = begin_one(writer, planned);
    }
    return pending;
  }

  RecordRef put(const std::string& key, int64_t value, uint64_t num_values) {
    auto pending = begin(key, value, num_values);
    if (!pending) throw ArenaFull("no room");
    return pending->commit();
  }

  Node& node;
  ClientId client;
  QueueWriter writer;
};

std::vector<int64_t> values(const RecordView& view) {
  const Field& field = view.description.fields.at(0);
  std::vector<int64_t> x(field.shape.at(0));
  std::memcpy(x.data(), view.bytes.data() + field.offset, field.nbytes);
  return x;
}

TEST(Dtype, KnowsPlainTypesAlone) {
  EXPECT_EQ(item_size("<f4"), 4u);
  EXPECT_EQ(item_size("|b1"), 1u);
  EXPECT_EQ(item_size("<c16"), 16u);
  EXPECT_EQ(item_size("<U5"), 20u);
  for (const char* bad : {"|O", "|V8", "f4", "<f", "", "<f4x", "<m8[s]"}) {
    EXPECT_THROW(item_size(bad), StorageError) << bad;
  }
  const std::vector<uint64_t> shape{uint64_t{1} << 40, uint64_t{1} << 40};
  EXPECT_THROW(array_bytes("<f4", shape), StorageError);
  EXPECT_EQ(array_bytes("<f4", {}), 4u);
}

TEST(Record, DescriptionSurvivesEncoding) {
  Node node;
  Writer writer(node, "w");
  const RecordRef ref = writer.put("k", 5, 10);
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const RecordView view = reader.read(ref);
  EXPECT_EQ(view.description.partition, "train");
  EXPECT_EQ(view.description.key, "k");
  EXPECT_EQ(view.description.tag, "tag of k");
  EXPECT_EQ(view.description.fields.at(1).dtype, "<f4");
  EXPECT_TRUE(view.description.fields.at(1).shape.empty());
  EXPECT_EQ(values(view), std::vector<int64_t>(10, 5));
  for (const Field& field : view.description.fields) EXPECT_EQ(field.offset % kAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.bytes.data()) % kAlignment, 0u);
}

TEST(Record, DamageIsSeen) {
  Node node;
  Writer writer(node, "w");
  const RecordRef ref = writer.put("k", 5, 10);
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  node.arena->data(ref.extent)[ref.offset + sizeof(RecordHeader) + 9] ^= std::byte{1};
  EXPECT_THROW(reader.read(ref), ChecksumMismatch);
}

TEST(Queue, PayloadMustMatchItsShape) {
  Node node;
  Writer writer(node, "w");
  writer.put("k", 1, 1);
  Description description = row("k", 3);
  const uint64_t length = plan_record(description);
  const std::vector<std::byte> wrong(8);
  EXPECT_THROW(begin_one(writer.writer, {description, length, {wrong, wrong}}), StorageError);
  EXPECT_EQ(node.manager->scan().size(), 1u);  // and the record that it began is gone
}

TEST(Queue, ManyRecordsAtOnceAsFarAsThereIsRoom) {
  Node node(4);
  Writer writer(node, "w");
  std::vector<std::vector<int64_t>> x;
  std::vector<PlannedRecord> planned;
  const float n = 1.0f;
  for (int i = 0; i < 20; ++i) {
    x.emplace_back(500, i);
    Description description = row(std::to_string(i), 500);
    const uint64_t length = plan_record(description);
    planned.push_back(
        {description, length, {std::as_bytes(std::span(x[i])), std::as_bytes(std::span(&n, 1))}});
  }
  std::vector<PendingRecord> pending;
  writer.writer.begin(planned, pending);
  EXPECT_TRUE(pending.empty());
  writer.writer.add(node.manager->grant(writer.client, planned[0].length, 3, writer.writer.held()));
  writer.writer.begin(planned, pending);
  ASSERT_EQ(pending.size(), 9u);  // three to an extent
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  EXPECT_TRUE(node.manager->scan().empty());
  for (size_t i = 0; i < pending.size(); ++i) {
    EXPECT_EQ(values(reader.read(pending[i].commit())), x[i]);
  }
}

TEST(Queue, UncommittedIsInvisible) {
  Node node;
  Writer writer(node, "w");
  {
    const auto pending = writer.begin("torn", 1, 100);
    writer.put("whole", 2, 100);
    ASSERT_EQ(node.manager->scan().size(), 1u);
    EXPECT_EQ(node.manager->scan()[0].description.key, "whole");
  }
  EXPECT_EQ(node.manager->scan().size(), 1u);
}

TEST(Queue, DeadWritersRowsStayButNotItsHalfWrittenOne) {
  Node node;
  const uint64_t before = node.manager->free_bytes();
  Writer writer(node, "w");
  const RecordRef whole = writer.put("whole", 2, 100);
  auto pending = writer.begin("torn", 1, 100);
  const Released released = node.manager->release_client("w");
  EXPECT_TRUE(released.known);
  EXPECT_EQ(released.num_records, 1u);
  EXPECT_EQ(released.num_extents, 2u);

  EXPECT_THROW(pending->commit(), Revoked);
  EXPECT_THROW(writer.put("late", 3, 1), Revoked);
  ASSERT_EQ(node.manager->scan().size(), 1u);
  EXPECT_EQ(node.manager->scan()[0].ref.offset, whole.offset);
  EXPECT_FALSE(node.manager->release_client("w").known);
  EXPECT_TRUE(node.manager->free(whole));
  EXPECT_EQ(node.manager->free_bytes(), before);
}

TEST(Queue, FreeIsIdempotentAndOldRefsFindNothing) {
  Node node;
  Writer writer(node, "w");
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const RecordRef ref = writer.put("a", 1, 10);
  const RecordRef other = writer.put("b", 2, 10);
  EXPECT_TRUE(node.manager->free(ref));
  EXPECT_FALSE(node.manager->free(ref));
  EXPECT_THROW(reader.read(ref), UnknownKey);  // its extent lives on
  EXPECT_EQ(values(reader.read(other))[0], 2);

  writer.writer.seal();
  EXPECT_TRUE(node.manager->free(other));
  EXPECT_EQ(node.manager->free_bytes(), node.arena->capacity());
  const RecordRef next = writer.put("c", 3, 10);
  EXPECT_EQ(next.extent, ref.extent);
  EXPECT_EQ(next.offset, ref.offset);
  EXPECT_THROW(reader.read(ref), UnknownKey);  // never the bytes of "c"
  EXPECT_FALSE(node.manager->free(ref));
  EXPECT_EQ(values(reader.read(next))[0], 3);
  for (RecordRef bad : {RecordRef{99, 0, 0, 64}, RecordRef{next.extent, next.generation, 1, 64},
                        RecordRef{next.extent, next.generation, uint64_t{1} << 60, 64},
                        RecordRef{next.extent, next.generation, 0, 128}}) {
    EXPECT_THROW(reader.read(bad), StorageError);
    EXPECT_FALSE(node.manager->free(bad));
  }
}

TEST(Queue, LeaseKeepsClearedBytes) {
  Node node(1);
  Writer writer(node, "w");
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const RecordRef ref = writer.put("a", 1, 1000);
  {
    const RecordView view = reader.read(ref);
    writer.writer.seal();
    EXPECT_TRUE(node.manager->free(ref));
    EXPECT_EQ(node.manager->free_bytes(), 0u);
    EXPECT_THROW(writer.put("b", 2, 1000), ArenaFull);
    EXPECT_EQ(values(view), std::vector<int64_t>(1000, 1));
    EXPECT_THROW(reader.read(ref), UnknownKey);  // no new lease on it
  }
  EXPECT_EQ(node.manager->free_bytes(), kExtent);
  writer.put("b", 2, 1000);
}

TEST(Queue, DeadReadersLeasesAreReturned) {
  Node node(1);
  Writer writer(node, "w");
  auto reader = std::make_unique<QueueReader>(node.map(), node.manager->register_client("r"));
  const RecordRef ref = writer.put("a", 1, 1000);
  auto view = std::make_unique<RecordView>(reader->read(ref));
  writer.writer.seal();
  node.manager->free(ref);
  EXPECT_EQ(node.manager->free_bytes(), 0u);
  EXPECT_EQ(node.manager->release_client("r").num_leases, 1u);
  EXPECT_EQ(node.manager->free_bytes(), kExtent);

  const RecordRef next = writer.put("b", 2, 1000);
  const QueueReader second(node.map(), node.manager->register_client("r"));
  const RecordView fresh = second.read(next);
  EXPECT_THROW(reader->read(next), Revoked);
  view.reset();  // the zombie's late return must not take the new lease away
  writer.writer.seal();
  node.manager->free(next);
  EXPECT_EQ(node.manager->free_bytes(), 0u);
}

TEST(Queue, RowsLargerThanAnExtentGetARun) {
  Node node(8);
  Writer writer(node, "w");
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const RecordRef small = writer.put("small", 1, 10);
  const RecordRef large = writer.put("large", 2, 5000);  // 40,000 bytes: three extents
  const RecordRef again = writer.put("small2", 3, 10);
  EXPECT_EQ(again.extent, small.extent);  // the open extent was kept
  EXPECT_EQ(values(reader.read(large)), std::vector<int64_t>(5000, 2));
  EXPECT_EQ(node.manager->free_bytes(), 3 * kExtent);  // two granted singles, a run of three
  EXPECT_TRUE(node.manager->free(large));
  EXPECT_EQ(node.manager->free_bytes(), 6 * kExtent);
  EXPECT_THROW(reader.read(large), UnknownKey);
  writer.put("large again", 4, 5000);
  EXPECT_THROW(writer.put("too large", 4, 100000), ArenaFull);
}

TEST(Queue, AskingAgainAfterALostAnswerLosesNothing) {
  Node node(4);
  const ClientId client = node.manager->register_client("w");
  const auto lost = node.manager->grant(client, 100, 2, {});
  ASSERT_EQ(lost.size(), 2u);
  const auto again = node.manager->grant(client, 100, 2, {});
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[0].extent, lost[0].extent);
  EXPECT_EQ(node.manager->free_bytes(), 2 * kExtent);
  const std::vector<uint32_t> held{lost[0].extent, lost[1].extent};
  EXPECT_EQ(node.manager->grant(client, 100, 2, held).size(), 2u);
  EXPECT_EQ(node.manager->free_bytes(), 0u);
}

TEST(Queue, RestartedManagerFindsEverything) {
  Node node(8);
  Writer writer(node, "w");
  const RecordRef a = writer.put("a", 1, 10);
  const RecordRef b = writer.put("b", 2, 5000);
  const RecordRef c = writer.put("c", 3, 10);
  node.manager->free(a);
  const uint64_t free_before = node.manager->free_bytes();
  // It died between two stores: in the middle of a free, and of a grant.
  node.arena->extent(b.extent).live.fetch_add(1);
  const uint32_t spare = 5 - 2;
  ASSERT_EQ(state_of(node.arena->extent(spare).word.load()), ExtentState::kFree);
  node.arena->extent(spare).word.store(extent_word(0, ExtentState::kMember));

  node.manager = std::make_unique<ArenaManager>(node.map());
  EXPECT_EQ(node.manager->free_bytes(), free_before);
  const auto found = node.manager->scan();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].description.key, "b");
  EXPECT_EQ(found[1].description.key, "c");
  EXPECT_LE(found[0].written_ns, found[1].written_ns);
  writer.put("d", 4, 10);  // writers did not notice
  node.manager->free(b);
  EXPECT_EQ(node.manager->free_bytes(), free_before + 3 * kExtent);
  node.manager->free(c);
}

TEST(Queue, ScansInPagesAndByOwner) {
  Node node(16);
  Writer writer(node, "w");
  Writer other(node, "o");
  for (int i = 0; i < 40; ++i) {
    (i % 4 == 0 ? other : writer).put(std::to_string(i), i, 200);
  }
  std::set<std::string> keys;
  uint32_t next = 0;
  int num_pages = 0;
  while (next < node.arena->num_extents()) {
    const ScanPage page = node.manager->scan(next, 5);
    for (const auto& info : page.records) EXPECT_TRUE(keys.insert(info.description.key).second);
    EXPECT_GT(page.next, next);
    next = page.next;
    ++num_pages;
  }
  EXPECT_EQ(keys.size(), 40u);
  EXPECT_GT(num_pages, 2);
  const ScanPage owned = node.manager->scan(0, SIZE_MAX, other.client);
  EXPECT_EQ(owned.records.size(), 10u);
  for (const auto& info : owned.records) {
    EXPECT_EQ(std::stoi(info.description.key) % 4, 0);
    EXPECT_TRUE(node.manager->holds(info.ref));
    EXPECT_TRUE(node.manager->free(info.ref));
    EXPECT_FALSE(node.manager->holds(info.ref));
  }
  EXPECT_EQ(node.manager->scan().size(), 30u);
}

TEST(Queue, SaysWhereItsBytesAre) {
  Node node(8);
  Writer writer(node, "w");
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const RecordRef a = writer.put("a", 1, 1500);
  const RecordRef b = writer.put("b", 2, 1500);
  const RecordRef large = writer.put("large", 3, 5000);
  ArenaUsage usage = node.manager->usage();
  EXPECT_EQ(usage.rows, 4 * kExtent);  // "a" sealed its extent when "b" did not fit in
  EXPECT_EQ(usage.open, kExtent);
  EXPECT_EQ(usage.leased, 0u);
  {
    const RecordView view = reader.read(large);
    EXPECT_TRUE(node.manager->free(large));
    EXPECT_TRUE(node.manager->free(a));
    usage = node.manager->usage();
    EXPECT_EQ(usage.leased, 3 * kExtent);
    EXPECT_EQ(usage.rows, 0u);
    EXPECT_EQ(usage.free, 4 * kExtent);
  }
  EXPECT_EQ(node.manager->usage().free, 7 * kExtent);
  EXPECT_TRUE(node.manager->free(b));
}

// The dullest model of it: a set of numbers.
TEST(FreeRuns, AgreesWithASet) {
  std::mt19937 random(1);
  FreeRuns runs;
  std::set<uint32_t> model;
  const auto lowest = [&](uint32_t length, bool last) -> std::optional<uint32_t> {
    std::optional<uint32_t> found;
    for (const uint32_t start : model) {
      bool all = true;
      for (uint32_t i = start; i < start + length; ++i) all &= model.contains(i);
      if (all && (last || !found)) found = start;
    }
    return found;
  };
  for (int step = 0; step < 3000; ++step) {
    const uint32_t length = 1 + random() % 4;
    if (random() % 2 == 0) {
      const uint32_t first = random() % 40;
      runs.add(first, length);
      for (uint32_t i = first; i < first + length; ++i) model.insert(i);
    } else {
      const bool last = random() % 2 == 0;
      const auto expected = lowest(length, last);
      ASSERT_EQ(last ? runs.take_last(length) : runs.take_first(length), expected);
      for (uint32_t i = 0; expected && i < length; ++i) model.erase(*expected + i);
    }
    ASSERT_EQ(runs.size(), model.size());
  }
}

TEST(Packing, PutsRowsOfAFieldOneAfterTheOther) {
  Node node(16);
  Writer writer(node, "w");
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  std::vector<RecordView> views;
  std::vector<PackSource> sources;
  std::vector<std::vector<RowPiece>> rows;
  for (int i = 0; i < 5; ++i) {
    views.push_back(reader.read(writer.put(std::to_string(i), i, 3 * i)));
    // The third one is elsewhere.
    sources.push_back({views[i].description, i == 2 ? ConstBytes{} : views[i].bytes});
    rows.push_back({{static_cast<uint32_t>(i), {"x", "n"}}});
  }
  const Packing packing(sources, rows, std::nullopt);
  ASSERT_EQ(packing.columns().size(), 2u);
  const PackedColumn& x = packing.columns()[0];
  EXPECT_EQ(x.offsets, (std::vector<int64_t>{0, 0, 3, 9, 18, 30}));
  EXPECT_EQ(x.nbytes, 30 * 8u);
  EXPECT_FALSE(x.scalar);
  EXPECT_TRUE(packing.columns()[1].scalar);
  EXPECT_EQ(packing.columns()[1].offsets.back(), 5);
  EXPECT_EQ(packing.columns()[1].place % kAlignment, 0u);

  std::vector<std::byte> buffer(packing.num_bytes(), std::byte{0xEE});
  packing.copy(buffer);
  const auto parts = packing.parts(0, 5);
  ASSERT_EQ(parts.size(), 2u);  // x and n of the one elsewhere
  EXPECT_TRUE(packing.parts(3, 5).empty());
  for (const PackPart& part : parts) {
    EXPECT_EQ(part.record, 2u);
    EXPECT_EQ(buffer[part.place], std::byte{0xEE});
    std::memcpy(buffer.data() + part.place, views[2].bytes.data() + part.offset, part.length);
  }
  std::vector<int64_t> packed(30);
  std::memcpy(packed.data(), buffer.data() + x.place, x.nbytes);
  for (int i = 0; i < 5; ++i) {
    for (int64_t k = x.offsets[i]; k < x.offsets[i + 1]; ++k) EXPECT_EQ(packed[k], i);
  }
  EXPECT_THROW(packing.copy(Bytes(buffer).first(10)), StorageError);
  EXPECT_THROW(Packing(sources, rows, std::vector<std::string>{"y"}), UnknownKey);
  rows[1][0].fields = {"n"};
  EXPECT_THROW(Packing(sources, rows, std::nullopt), UnknownKey);
  rows[1][0] = {9, {"x", "n"}};
  EXPECT_THROW(Packing(sources, rows, std::nullopt), StorageError);
}

TEST(Queue, ArenaIsCheckedWhenOpened) {
  EXPECT_THROW(Arena::open(Segment::create("s", 1 << 16, "key")), StorageError);
  EXPECT_THROW(Arena::format(Segment::create("s", 1 << 16, "key"), 1000, 8), StorageError);
  EXPECT_THROW(Arena::format(Segment::create("s", 1 << 12, "key"), 1 << 16, 8), StorageError);
  Node node;
  EXPECT_THROW(Arena::format(node.segment, kExtent, 8), StorageError);
  for (int i = 0; i < 8; ++i) node.manager->register_client("c" + std::to_string(i));
  EXPECT_THROW(node.manager->register_client("one more"), StorageError);
  EXPECT_NO_THROW(node.manager->register_client("c3"));  // a restarted one takes its place
}

// Writers, readers and the manager at once on an arena that is always nearly full: every read gives
// the row that was asked for or UnknownKey, and in the end every byte is free again.

// What a header says is believed once, at open, and only if it can be.
TEST(Queue, RefusesAHeaderThatCannotBe) {
  const uint64_t num_extents = Node(8).arena->num_extents();
  const uint64_t huge = uint64_t{1} << 63;
  const Geometry bad[] = {
      {0, num_extents, 8},
      {1000, num_extents, 8},
      {kExtent, 0, 8},
      {kExtent, num_extents, 0},
      {huge, 2, 8},
      {kExtent, huge, 8},
      {huge, huge, 8},
      {kExtent, 1 << 20, 8},
      {kExtent, 1, UINT32_MAX},
      {uint64_t{1} << 40, 1u << 24, 8},
  };
  for (const Geometry& said : bad) {
    const Node node(8);
    auto* header = reinterpret_cast<ArenaHeader*>(node.segment->bytes().data());
    header->extent_bytes = said.extent_bytes;
    header->num_extents = said.num_extents;
    header->max_clients = said.max_clients;
    EXPECT_THROW(Arena::open(Segment::attach(node.segment->fd())), StorageError)
        << said.extent_bytes << " " << said.num_extents << " " << said.max_clients;
  }
}

TEST(Queue, StaysWithinTheArenaWhateverIsWrittenToItsTables) {
  Node node(4);
  Writer alice(node, "alice");
  const RecordRef ref = alice.put("a", 1, 4);
  QueueReader reader(node.map(), node.manager->register_client("bob"));
  auto* header = reinterpret_cast<ArenaHeader*>(node.segment->bytes().data());
  header->num_extents = uint64_t{1} << 40;  // opened before: nobody looks any more
  header->extent_bytes = uint64_t{1} << 40;
  EXPECT_EQ(node.arena->capacity(), 4 * kExtent);
  EXPECT_EQ(reader.read(ref).description.key, "a");

  ExtentEntry& extent = node.arena->extent(ref.extent);
  extent.bump.store(UINT64_MAX - 63);
  EXPECT_FALSE(node.manager->free({ref.extent, ref.generation, UINT64_MAX - 127, 64}));
  EXPECT_THROW(node.manager->scan(), ChecksumMismatch);
  EXPECT_TRUE(alice.begin("b", 2, 4));  // full, as far as it says: another extent is taken
  extent.run.store(UINT32_MAX);
  EXPECT_THROW(reader.read(ref), StorageError);
  EXPECT_FALSE(node.manager->free({ref.extent, ref.generation, 1 << 30, 64}));
  extent.live.store(0);
  node.manager->sweep();  // gives the whole run back, which ends with the arena
  EXPECT_EQ(node.arena->extent(3).live.load(), 0U);
}

TEST(Queue, LeaseAndReclaimRace) {
  constexpr int kWriters = 2;
  constexpr int kReaders = 3;
  constexpr int kRows = 3000;
  constexpr uint64_t kReads = 300;
  Node node(6);
  std::mutex manager_mutex;  // stands for the StorageActor's loop
  std::vector<std::unique_ptr<Writer>> writers;
  for (int w = 0; w < kWriters; ++w) {
    writers.push_back(std::make_unique<Writer>(node, "w" + std::to_string(w)));
  }
  struct Shared {
    std::mutex mutex;
    std::deque<std::pair<RecordRef, int64_t>> rows;
  } shared;
  std::atomic<int> writing{kWriters};
  std::atomic<uint64_t> num_read{0};
  std::atomic<uint64_t> num_wrong{0};
  // Writing goes on until the readers have had their share: all rows may fit into one time slice.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto late = [&] { return std::chrono::steady_clock::now() > deadline; };

  const auto write = [&](int w) {
    QueueWriter& writer = writers[w]->writer;
    for (int i = 0; i < kRows || (num_read.load() < kReads && !late()); ++i) {
      const int64_t value = w + int64_t{kWriters} * i;
      Description description = row(std::to_string(value), 50 + i % 300);
      const uint64_t length = plan_record(description);
      const std::vector<int64_t> x(50 + i % 300, value);
      const float n = 0;
      const PlannedRecord planned{
          description, length, {std::as_bytes(std::span(x)), std::as_bytes(std::span(&n, 1))}};
      auto pending = begin_one(writer, planned);
      while (!pending) {
        std::vector<RecordRef> to_free;
        {
          const std::lock_guard lock(shared.mutex);
          while (shared.rows.size() > 4) {
            to_free.push_back(shared.rows.front().first);
            shared.rows.pop_front();
          }
        }
        const std::lock_guard lock(manager_mutex);
        for (const RecordRef& ref : to_free) node.manager->free(ref);
        writer.add(node.manager->grant(writers[w]->client, length, 1, writer.held()));
        pending = begin_one(writer, planned);
        if (!pending) std::this_thread::yield();
      }
      const RecordRef ref = pending->commit();
      const std::lock_guard lock(shared.mutex);
      shared.rows.emplace_back(ref, value);
    }
    writer.seal();
    --writing;
  };
  const auto read = [&](int r) {
    ClientId client;
    {
      const std::lock_guard lock(manager_mutex);
      client = node.manager->register_client("r" + std::to_string(r));
    }
    const QueueReader reader(node.map(), client);
    std::mt19937 random(r);
    while (writing.load() > 0) {
      std::pair<RecordRef, int64_t> target;
      {
        const std::lock_guard lock(shared.mutex);
        if (shared.rows.empty()) continue;
        target = shared.rows[random() % shared.rows.size()];
      }
      // Often freed after it; on one core always, so not each time.
      if (random() % 2 == 0) std::this_thread::yield();
      try {
        const RecordView view = reader.read(target.first);
        std::this_thread::yield();  // let it be freed under the lease
        for (const int64_t value : values(view)) num_wrong += value != target.second;
        ++num_read;
      } catch (const UnknownKey&) {
      }
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < kReaders; ++r) threads.emplace_back(read, r);
  for (int w = 0; w < kWriters; ++w) threads.emplace_back(write, w);
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(num_wrong.load(), 0u);
  EXPECT_GE(num_read.load(), kReads);
  for (const auto& info : node.manager->scan()) EXPECT_TRUE(node.manager->free(info.ref));
  EXPECT_EQ(node.manager->free_bytes(), node.arena->capacity());
}

// One writer used by several threads: nobody's record is lost or reclaimed under it.
TEST(Queue, WriterIsThreadSafe) {
  Node node(64);
  Writer writer(node, "w");
  std::mutex manager_mutex;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        Description description = row(std::to_string(t * 1000 + i), 100);
        const uint64_t length = plan_record(description);
        const std::vector<int64_t> x(100, t * 1000 + i);
        const float n = 0;
        const PlannedRecord planned{
            description, length, {std::as_bytes(std::span(x)), std::as_bytes(std::span(&n, 1))}};
        auto pending = begin_one(writer.writer, planned);
        while (!pending) {
          const std::lock_guard lock(manager_mutex);
          writer.writer.add(node.manager->grant(writer.client, length, 1, writer.writer.held()));
          pending = begin_one(writer.writer, planned);
        }
        pending->commit();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const QueueReader reader(node.map(), node.manager->register_client("r"));
  const auto found = node.manager->scan();
  EXPECT_EQ(found.size(), 800u);
  for (const auto& info : found) {
    EXPECT_EQ(values(reader.read(info.ref))[99], std::stoll(info.description.key));
  }
}

}  // namespace
}  // namespace psrl
