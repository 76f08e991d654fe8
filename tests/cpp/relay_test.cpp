// Transfers between relays over tcp: chains, trees, stars; damage, loss and changes of the way.
#include "weights/relay.h"

#include <gtest/gtest.h>

#include <random>

#include "base/checksum.h"
#include "base/errors.h"
#include "link/wire.h"
#include "link_testing.h"

namespace psrl::weights {
namespace {

using namespace psrl::link::testing;
using link::Advert;
using link::Event;
using link::PeerId;

constexpr uint64_t kUnit = 64 << 10;
constexpr uint64_t kChunk = 4 * kUnit;
constexpr uint64_t kMemory = 3 * kChunk + kUnit + 777;  // the last chunk is short, its end odd
constexpr uint64_t kOffset = 4096;                      // of the memory in its region
constexpr size_t kUnitAt = 6 + 8 + 1 + 16;              // of the unit in a notice

std::vector<Unit> all_units() {
  std::vector<Unit> units;
  for (uint64_t at = 0; at < kMemory; at += kUnit) {
    units.push_back({{at, std::min(kUnit, kMemory - at)}});
  }
  return units;
}

// A node of a transfer.
class Member {
 public:
  explicit Member(const std::string& name, uint64_t seed = 0)
      : node(std::make_unique<Node>("tcp", name, kOffset + kMemory)), name(name) {
    if (seed != 0) node->fill(seed);
  }
  ~Member() {
    if (relay) relay->close();
  }

  Relay& open(RelayOptions options, std::vector<bool> have) {
    if (relay) relay->close();
    relay = Relay::open(node->endpoint(), node->region(), kOffset, kMemory, std::move(options),
                        std::move(have));
    return *relay;
  }
  void feed(Member& successor, uint64_t first, uint64_t end) {
    if (!peers.contains(successor.name)) {
      peers[successor.name] = node->connect(successor.node->endpoint().address());
    }
    // One way from the same node for each source's part.
    const std::string part = first == 0 ? "" : "/" + std::to_string(first);
    relay->send_to(successor.name + part, peers[successor.name],
                   successor.relay->open_window(name + part), first, end, successor.relay->have());
  }
  bool holds(uint64_t seed) { return node->holds(seed, kOffset, kMemory); }
  std::vector<uint32_t> sums() {
    std::vector<uint32_t> sums;
    for (uint64_t at = 0; at < kMemory; at += kChunk) {
      const ConstBytes chunk{node->data() + kOffset + at, std::min(kChunk, kMemory - at)};
      sums.push_back(crc32c(chunk, static_cast<uint32_t>(at / kChunk)));
    }
    return sums;
  }

  std::unique_ptr<Node> node;
  std::string name;
  std::shared_ptr<Relay> relay;
  std::map<std::string, PeerId> peers;
};

bool wait_until(const std::function<bool()>& met, link::Clock::duration patience = kPatience) {
  for (const auto deadline = in(patience); link::Clock::now() < deadline;) {
    if (met()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return met();
}

class RelayTest : public ::testing::Test {
 protected:
  RelayOptions options() const {
    return {.transfer = 77, .units = all_units(), .chunk_bytes = kChunk};
  }
  uint64_t num_units() const { return all_units().size(); }
  std::vector<bool> all() const { return std::vector<bool>(num_units(), true); }
  std::vector<bool> none() const { return std::vector<bool>(num_units(), false); }

  // One source and some that lack everything; parents[i] feeds i + 1.
  void start(const std::vector<size_t>& parents, RelayOptions options) {
    members.push_back(std::make_unique<Member>("source", 5));
    members[0]->open(options, all());
    for (size_t i = 0; i < parents.size(); ++i) {
      members.push_back(std::make_unique<Member>("node-" + std::to_string(i + 1)));
      members.back()->open(options, none());
    }
    for (size_t i = 0; i < parents.size(); ++i) {
      members[parents[i]]->feed(*members[i + 1], 0, num_units());
    }
  }
  void require_complete() {
    for (size_t i = 1; i < members.size(); ++i) {
      ASSERT_TRUE(wait_until([&] { return members[i]->relay->progress().complete; })) << i;
      EXPECT_TRUE(members[i]->holds(5)) << i;
      EXPECT_EQ(members[i]->relay->chunk_sums(), members[0]->sums()) << i;
      EXPECT_EQ(members[i]->relay->progress().problem, "") << i;
    }
  }

  std::vector<std::unique_ptr<Member>> members;
};

TEST_F(RelayTest, ChainTreeAndStarBringEveryByte) {
  for (const auto& parents :
       std::vector<std::vector<size_t>>{{0, 1, 2}, {0, 0, 1, 1, 2}, {0, 0, 0}}) {
    members.clear();
    start(parents, options());
    require_complete();
    for (const auto& counted : members[0]->node->endpoint().counters()) {
      EXPECT_GE(counted.bytes_put, kMemory);
      EXPECT_LT(counted.bytes_put, kMemory + kUnit);  // each unit once
    }
  }
}

TEST_F(RelayTest, KnownSumsAreCompared) {
  RelayOptions with_sums = options();
  Member source("source", 5);
  with_sums.expected = source.sums();
  start({0, 1}, with_sums);
  require_complete();

  with_sums.expected[1] ^= 1;
  members.clear();
  start({0}, with_sums);
  ASSERT_TRUE(wait_until([&] { return !members[0]->relay->progress().problem.empty(); }));
  EXPECT_NE(members[0]->relay->progress().problem.find("chunk 1"), std::string::npos);
  EXPECT_FALSE(members[1]->relay->progress().complete);
}

TEST_F(RelayTest, DescriptorTellsTheEnd) {
  start({0}, options());
  pollfd polled{members[1]->relay->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  require_complete();
  polled.fd = members[0]->relay->fd();
  ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  EXPECT_EQ(members[0]->relay->progress().successors[0].arrived, num_units());
}

TEST_F(RelayTest, SeveralSourcesWithManyRangesEach) {
  // Ranges of 1,000 bytes, by turns of three nodes; each hands its part on along a chain.
  RelayOptions options{.transfer = 3};
  std::vector<uint64_t> begins = {0};
  for (uint64_t source = 0; source < 3; ++source) {
    Unit unit;
    for (uint64_t at = source * 1000; at < kMemory; at += 3000) {
      unit.push_back({at, std::min<uint64_t>(1000, kMemory - at)});
      if (unit.size() == 16) options.units.push_back(std::exchange(unit, {}));
    }
    if (!unit.empty()) options.units.push_back(unit);
    begins.push_back(options.units.size());
  }
  for (uint64_t source = 0; source < 3; ++source) {
    members.push_back(std::make_unique<Member>("node-" + std::to_string(source)));
    Member& member = *members.back();
    std::vector<bool> have(options.units.size());
    for (uint64_t unit = begins[source]; unit < begins[source + 1]; ++unit) {
      have[unit] = true;
      for (const Range& range : options.units[unit]) {
        for (uint64_t i = 0; i < range.length; ++i) {
          const uint64_t at = kOffset + range.offset + i;
          member.node->data()[at] = Node::pattern(9, at);
        }
      }
    }
    member.open(options, have);
  }
  for (uint64_t source = 0; source < 3; ++source) {
    for (uint64_t hop = 0; hop < 2; ++hop) {
      members[(source + hop) % 3]->feed(*members[(source + hop + 1) % 3], begins[source],
                                        begins[source + 1]);
    }
  }
  for (const auto& member : members) {
    ASSERT_TRUE(wait_until([&] { return member->relay->progress().complete; }));
    EXPECT_TRUE(member->holds(9));
    EXPECT_TRUE(member->relay->chunk_sums().empty());
  }
}

TEST_F(RelayTest, TheNextOneIsPassedByAndItsSuccessorGetsTheRest) {
  RelayOptions slow = options();
  slow.max_in_flight = 1;
  start({0, 1}, slow);
  ASSERT_TRUE(wait_until([&] { return members[2]->relay->progress().have >= 2; }));
  members[1]->relay->close();
  members[1]->node->destroy();
  members[1]->relay.reset();
  members[0]->relay->stop_sending("node-1");
  members[2]->relay->close_window("node-1");
  members[0]->feed(*members[2], 0, num_units());
  ASSERT_TRUE(wait_until([&] { return members[2]->relay->progress().complete; }));
  EXPECT_TRUE(members[2]->holds(5));
  EXPECT_EQ(members[2]->relay->chunk_sums(), members[0]->sums());
}

TEST_F(RelayTest, ALostSuccessorIsToldAndOthersGoOn) {
  start({0, 0}, options());
  require_complete();
  members[1]->open(options(), none());
  members[2]->open(options(), none());
  members[1]->node->endpoint().close(in(0s));  // gone, but its window was told
  Advert gone{.window = 1, .generation = 1, .length = kMemory, .key = {}};
  members[0]->relay->send_to("node-1", members[0]->peers["node-1"], gone, 0, num_units(), none());
  members[0]->feed(*members[2], 0, num_units());
  ASSERT_TRUE(wait_until([&] { return members[2]->relay->progress().complete; }));
  ASSERT_TRUE(
      wait_until([&] { return !members[0]->relay->progress().successors[0].problem.empty(); }));
  EXPECT_EQ(members[0]->relay->progress().successors[1].problem, "");
  EXPECT_EQ(members[0]->relay->progress().problem, "");
}

TEST_F(RelayTest, AVersionThatWasTakenBackIsNotSent) {
  std::atomic<bool> valid = true;
  RelayOptions limited = options();
  limited.valid = [&] { return valid.load(); };
  start({0}, limited);
  require_complete();
  valid = false;
  members[1]->open(options(), none());
  members[0]->feed(*members[1], 0, num_units());
  ASSERT_TRUE(wait_until([&] { return !members[0]->relay->progress().problem.empty(); }));
  EXPECT_EQ(members[1]->relay->progress().have, 0);
}

// A predecessor of the test's own, who can lie.
class Liar {
 public:
  explicit Liar(Member& victim)
      : node("tcp", "liar", kMemory), window(victim.relay->open_window("liar")) {
    node.fill(8);
    peer = node.connect(victim.node->endpoint().address());
  }

  std::string notice(uint32_t unit, uint64_t transfer = 77, uint32_t damage = 0) {
    std::string text = "psrl.w";
    link::put<uint64_t>(text, transfer);
    link::put<uint8_t>(text, 1);
    link::put<uint64_t>(text, window.window);
    link::put<uint64_t>(text, window.generation);
    link::put<uint32_t>(text, unit);
    const uint64_t start = unit / 4 * kChunk, at = unit * kUnit;
    const uint32_t before = crc32c({node.data() + start, at - start}, unit / 4);
    link::put<uint32_t>(text, before);
    link::put<uint32_t>(text,
                        crc32c({node.data() + at, std::min(kUnit, kMemory - at)}, before) + damage);
    return text;
  }
  void put(uint32_t unit, const std::string& text) {
    const uint64_t at = unit * kUnit;
    const Event event =
        node.done(node.put(peer, window, {{at, at, std::min(kUnit, kMemory - at)}}, text));
    EXPECT_EQ(event.status, link::Status::kOk);
  }
  bool asked(uint32_t unit) {
    const auto event = node.next(Event::Kind::kNotice);
    return event && event->text.size() == 19 && event->text[14] == 2 &&
           link::get<uint32_t>(event->text, 15) == unit;
  }

  Node node;
  Advert window;
  PeerId peer = 0;
};

TEST_F(RelayTest, DamagedUnitsAreAskedForAgainAndThenGivenUp) {
  Member victim("victim");
  victim.open(options(), none());
  Liar liar(victim);
  liar.put(2, liar.notice(2, 77, 1));
  ASSERT_TRUE(liar.asked(2));
  EXPECT_EQ(victim.relay->progress().have, 0);
  liar.put(2, liar.notice(2));
  ASSERT_TRUE(wait_until([&] { return victim.relay->progress().have == 1; }));
  EXPECT_EQ(victim.relay->progress().damaged, 1);
  for (int i = 0; i < 3; ++i) {
    liar.put(3, liar.notice(3, 77, 1));
    if (i < 2) {
      ASSERT_TRUE(liar.asked(3));
    }
  }
  ASSERT_TRUE(wait_until([&] { return !victim.relay->progress().problem.empty(); }));
  EXPECT_EQ(victim.relay->progress().problem, "unit 3 came damaged 3 times");
}

TEST_F(RelayTest, UnitsInEachOthersPlacesAreDamage) {
  Member victim("victim");
  victim.open(options(), none());
  Liar liar(victim);
  // Unit 4 begins chunk 1; said to be unit 0, its sum began with another number.
  std::string swapped = liar.notice(4);
  for (size_t i = 0; i < 4; ++i) swapped[kUnitAt + i] = 0;
  const Event event =
      liar.node.done(liar.node.put(liar.peer, liar.window, {{4 * kUnit, 0, kUnit}}, swapped));
  EXPECT_EQ(event.status, link::Status::kOk);
  ASSERT_TRUE(wait_until([&] { return !victim.relay->progress().problem.empty(); }));
  EXPECT_EQ(victim.relay->progress().problem, "chunk 0 is not what was sealed");
}

TEST_F(RelayTest, NoticesThatAreNotOursAreIgnored) {
  Member victim("victim");
  victim.open(options(), none());
  Liar liar(victim);
  liar.put(0, liar.notice(0, 76));       // an older transfer
  liar.put(0, "psrl.w");                 // cut
  liar.put(0, liar.notice(0) + "more");  // too long
  liar.put(0, liar.notice(0).substr(0, 15));
  std::string outside = liar.notice(0);
  outside[kUnitAt] = 100;
  liar.put(0, outside);
  const std::string before = liar.notice(1);
  liar.put(1, before);
  liar.put(1, before);  // twice
  liar.window = victim.relay->open_window("liar");
  liar.put(2, before);  // of the window that is closed
  liar.put(3, liar.notice(3));
  ASSERT_TRUE(wait_until([&] { return victim.relay->progress().have >= 2; }));
  const std::vector<bool> have = victim.relay->have();
  EXPECT_TRUE(have[1] && have[3]);
  EXPECT_EQ(victim.relay->progress().have, 2);
  EXPECT_EQ(victim.relay->progress().damaged, 0);
}

TEST_F(RelayTest, ClosingInTheMiddleLeavesNothingBehind) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    members.clear();
    start({0, 1}, options());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    const size_t victim = random() % 3;
    members[victim]->relay->close();
    members[victim]->relay.reset();
    if (random() % 2 == 0) members[victim]->node->destroy();
  }
}

TEST_F(RelayTest, NonsenseIsRefused) {
  Member member("m");
  const auto refused = [&](RelayOptions bad, std::vector<bool> have) {
    EXPECT_THROW(Relay::open(member.node->endpoint(), member.node->region(), kOffset, kMemory,
                             std::move(bad), std::move(have)),
                 StorageError);
  };
  refused(options(), {});
  refused({.units = {{{kMemory - 1, 2}}}}, {false});
  refused({.units = {{{~0ull, 2}}}}, {false});
  refused(
      {.units = {{{0, kChunk + 1}}, {{kChunk + 1, kMemory - kChunk - 1}}}, .chunk_bytes = kChunk},
      {false, false});
  refused({.units = {{{0, kChunk}}}, .chunk_bytes = kChunk}, {false});
  refused({.units = {{{0, 10}, {10, 10}}}, .chunk_bytes = kChunk}, {false});
  RelayOptions sums = options();
  sums.expected = {1};
  refused(sums, none());
  EXPECT_THROW(Relay::open(member.node->endpoint(), member.node->region(), kOffset + 1, kMemory,
                           options(), none()),
               LinkError);
  Relay& relay = member.open(options(), none());
  EXPECT_THROW(relay.send_to("x", 1, {}, 0, 1, none()), StorageError);
  EXPECT_THROW(relay.send_to("x", 1, {.length = kMemory, .key = {}}, 0, num_units() + 1, none()),
               StorageError);
  EXPECT_THROW(relay.chunk_sums(), StorageError);
  relay.close();
  EXPECT_THROW(relay.open_window("x"), StorageError);
}

}  // namespace
}  // namespace psrl::weights
