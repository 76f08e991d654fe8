// The promises of link/link.h, held by every transport.
#include <sys/mman.h>

#include <atomic>
#include <mutex>
#include <random>
#include <set>

#include "base/errors.h"
#include "link_testing.h"

namespace psrl::link::testing {
namespace {

size_t num_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

class LinkContract : public ::testing::TestWithParam<std::string> {
 protected:
  Node node(const std::string& name, size_t bytes = 1 << 20) { return {GetParam(), name, bytes}; }
  PeerProcess process(size_t bytes = 1 << 20) { return {GetParam(), bytes}; }
};

// ---- what goes well

TEST_P(LinkContract, PutThenNotice) {
  Node a = node("a"), b = node("b");
  a.fill(1);
  const PeerId peer = a.connect(b->address());
  const auto connected = b.next(Event::Kind::kPeerConnected);
  ASSERT_TRUE(connected);
  EXPECT_EQ(connected->text, "a");
  const OpId op = a.put(peer, b.window(), {{10, 20, 1000}}, std::string("n\0tice", 6));
  const auto notice = b.next(Event::Kind::kNotice);
  ASSERT_TRUE(notice);
  EXPECT_EQ(notice->text, std::string("n\0tice", 6));
  EXPECT_EQ(notice->peer, connected->peer);
  EXPECT_TRUE(b.holds(1, 20, 1000, 10));
  EXPECT_EQ(a.done(op).status, Status::kOk);
}

TEST_P(LinkContract, ConnectNamesThePeer) {
  Node a = node("a"), b = node("the other one");
  const Event event = a.done(a->connect(b->address(), in(kPatience)));
  EXPECT_EQ(event.status, Status::kOk);
  EXPECT_EQ(event.text, "the other one");
  EXPECT_NE(event.peer, 0u);
  EXPECT_EQ(b->address().substr(0, GetParam().size() + 1), GetParam() + ":");
}

TEST_P(LinkContract, LargePut) {
  constexpr size_t kBytes = (48 << 20) + 12345;
  Node a = node("a", kBytes), b = node("b", kBytes);
  a.fill(2);
  const PeerId peer = a.connect(b->address());
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, kBytes}})).status, Status::kOk);
  EXPECT_TRUE(b.holds(2, 0, kBytes));
}

TEST_P(LinkContract, LargePull) {
  constexpr size_t kBytes = (48 << 20) + 12345;
  Node a = node("a", kBytes), b = node("b", kBytes);
  b.fill(3);
  const PeerId peer = a.connect(b->address());
  EXPECT_EQ(a.done(a.pull(peer, b.window(WindowAccess::kPull), {{0, 0, kBytes}})).status,
            Status::kOk);
  EXPECT_TRUE(a.holds(3, 0, kBytes));
}

TEST_P(LinkContract, ManyScatteredPieces) {
  constexpr size_t kBytes = 8 << 20, kPieces = 3000;
  Node a = node("a", kBytes), b = node("b", kBytes);
  a.fill(4);
  std::mt19937_64 random(4);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < kPieces; ++i) {  // each into a place of its own
    const uint64_t length = random() % (kBytes / kPieces);
    pieces.push_back({random() % (kBytes - length), i * (kBytes / kPieces), length});
  }
  const PeerId peer = a.connect(b->address());
  ASSERT_EQ(a.done(a.put(peer, b.window(), pieces)).status, Status::kOk);
  for (const Piece& piece : pieces) {
    ASSERT_TRUE(b.holds(4, piece.remote_offset, piece.length, piece.local_offset));
  }
  a.fill(5);
  b.fill(6);
  std::vector<Piece> back;
  for (const Piece& piece : pieces) {
    back.push_back({piece.remote_offset, piece.local_offset, piece.length});
  }
  ASSERT_EQ(a.done(a.pull(peer, b.window(WindowAccess::kPull), back)).status, Status::kOk);
  for (const Piece& piece : back) {
    ASSERT_TRUE(a.holds(6, piece.local_offset, piece.length, piece.remote_offset));
  }
}

TEST_P(LinkContract, TheOneThatAcceptedPutsAndPullsToo) {
  Node a = node("a"), b = node("b");
  a.connect(b->address());
  const auto connected = b.next(Event::Kind::kPeerConnected);
  ASSERT_TRUE(connected);
  b.fill(7);
  EXPECT_EQ(b.done(b.put(connected->peer, a.window(), {{0, 0, b.size()}}, "back")).status,
            Status::kOk);
  EXPECT_TRUE(a.next(Event::Kind::kNotice));
  EXPECT_TRUE(a.holds(7, 0, a.size()));
  a.fill(8);
  EXPECT_EQ(b.done(b.pull(connected->peer, a.window(WindowAccess::kPull), {{0, 0, 100}})).status,
            Status::kOk);
  EXPECT_TRUE(b.holds(8, 0, 100));
}

TEST_P(LinkContract, NothingIsFine) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  const Advert put = b.window(), pull = b.window(WindowAccess::kPull);
  EXPECT_EQ(a.done(a.put(peer, put, {}, "none")).status, Status::kOk);
  EXPECT_TRUE(b.next(Event::Kind::kNotice));
  EXPECT_EQ(a.done(a.put(peer, put, {{5, 5, 0}, {b.size(), b.size(), 0}})).status, Status::kOk);
  EXPECT_EQ(a.done(a.pull(peer, pull, {})).status, Status::kOk);
  EXPECT_EQ(a.done(a.pull(peer, pull, {{5, 5, 0}})).status, Status::kOk);
  EXPECT_EQ(a.done(a->flush(peer, in(kPatience))).status, Status::kOk);
  b->withdraw(put);
  EXPECT_EQ(a.done(a.put(peer, put, {}, "none")).status, Status::kStale);
}

TEST_P(LinkContract, SegmentsAreRegions) {
  Node a = node("a"), b = node("b");
  const auto segment = Segment::create("s", 1 << 20, "key");
  const RegionPtr region = b->add_region(segment);
  const PeerId peer = a.connect(b->address());
  a.fill(9);
  const Advert window = b->advertise(region, 4096, 8192, WindowAccess::kPut);
  EXPECT_EQ(window.length, 8192u);
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 8192}})).status, Status::kOk);
  EXPECT_EQ(std::memcmp(segment->bytes().data() + 4096, a.data(), 8192), 0);
  // The advert is plain bytes, and those are enough.
  const Advert decoded = Advert::decode(window.encode());
  EXPECT_EQ(a.done(a.put(peer, decoded, {{1, 0, 8}})).status, Status::kOk);
  EXPECT_EQ(std::memcmp(segment->bytes().data() + 4096, a.data() + 1, 8), 0);

  const auto reader = Segment::attach(segment->fd(), Access::kReadOnly);
  const RegionPtr read_only = b->add_region(reader);
  EXPECT_EQ(
      a.done(a.pull(peer, b->advertise(read_only, 4096, 8, WindowAccess::kPull), {{100, 0, 8}}))
          .status,
      Status::kOk);
  EXPECT_EQ(std::memcmp(a.data() + 100, a.data() + 1, 8), 0);
  EXPECT_THROW(b->advertise(read_only, 0, 8, WindowAccess::kPut), LinkError);
}

TEST_P(LinkContract, AnotherProcess) {
  constexpr size_t kBytes = 4 << 20;
  PeerProcess child = process(kBytes);
  Node a = node("a", kBytes);
  a.fill(10);
  const PeerId peer = a.connect(child.address);
  EXPECT_EQ(a.done(a.put(peer, child.put_window, {{0, 0, kBytes}})).status, Status::kOk);
  EXPECT_EQ(child.ask("check 10 0 " + std::to_string(kBytes)), "yes");
  EXPECT_EQ(child.ask("fill 11"), "ok");
  EXPECT_EQ(a.done(a.pull(peer, child.pull_window, {{0, 0, kBytes}})).status, Status::kOk);
  EXPECT_TRUE(a.holds(11, 0, kBytes));
}

// ---- order

TEST_P(LinkContract, FlushEndsAfterAllBefore) {
  constexpr size_t kBytes = 4 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  const PeerId peer = a.connect(b->address());
  const Advert put = b.window(), pull = b.window(WindowAccess::kPull);
  std::set<OpId> before;
  for (int i = 0; i < 5; ++i) {
    before.insert(a.put(peer, put, {{0, 0, kBytes}}));
    before.insert(a.pull(peer, pull, {{0, 0, 100'000}}));
    before.insert(a->notify(peer, "n", in(kPatience)));
  }
  const OpId flush = a->flush(peer, in(kPatience));
  const OpId after = a.put(peer, put, {{0, 0, kBytes}});
  while (true) {
    const auto event = a.next(Event::Kind::kDone);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->status, Status::kOk) << event->text;
    if (event->op == flush) break;
    before.erase(event->op);
  }
  EXPECT_TRUE(before.empty());
  a.events.clear();
  (void)after;
}

TEST_P(LinkContract, NoticesComeAfterWhatWasPutBefore) {
  constexpr size_t kBytes = 3 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  for (uint64_t round = 0; round < 10; ++round) {
    a.fill(round);
    const OpId op = a.put(peer, window, {{0, 0, kBytes}});
    a->notify(peer, "put " + std::to_string(round), in(kPatience));
    const auto notice = b.next(Event::Kind::kNotice);
    ASSERT_TRUE(notice);
    ASSERT_EQ(notice->text, "put " + std::to_string(round));
    ASSERT_TRUE(b.holds(round, 0, kBytes));
    ASSERT_EQ(a.done(op).status, Status::kOk);
  }
}

TEST_P(LinkContract, NotifyEndsWhenItWasSeen) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  std::vector<OpId> ops;
  for (int i = 0; i < 3000; ++i) ops.push_back(a->notify(peer, std::to_string(i), in(kPatience)));
  for (const OpId op : ops) ASSERT_EQ(a.done(op).status, Status::kOk);
  for (int i = 0; i < 3000; ++i) {
    const auto notice = b.next(Event::Kind::kNotice);
    ASSERT_TRUE(notice);
    ASSERT_EQ(notice->text, std::to_string(i));
  }
}

TEST_P(LinkContract, SmallOnesAreNotStarvedByLargeOnes) {
  constexpr size_t kBytes = 64 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  const PeerId peer = a.connect(b->address());
  const auto connected = b.next(Event::Kind::kPeerConnected);
  ASSERT_TRUE(connected);
  const Advert window = b.window(), back = a.window();
  std::vector<OpId> large;
  for (int i = 0; i < 4; ++i) large.push_back(a.put(peer, window, {{0, 0, kBytes}}));
  // Small ones of both directions end while the large ones still go on.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 100}})).status, Status::kOk);
    EXPECT_EQ(b.done(b.put(connected->peer, back, {{0, 0, 100}}, "n")).status, Status::kOk);
  }
  size_t ended = 0;
  for (const Event& event : a.events) ended += event.kind == Event::Kind::kDone;
  EXPECT_LT(ended, large.size()) << "all large ones ended first";
  for (const OpId op : large) EXPECT_EQ(a.done(op).status, Status::kOk);
}

// ---- windows

TEST_P(LinkContract, StaleWindowIsRefused) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  b.fill(20);
  const Advert put = b.window(), pull = b.window(WindowAccess::kPull), other = b.window();
  b->withdraw(put);
  b->withdraw(put);
  b->withdraw(pull);
  EXPECT_EQ(a.done(a.put(peer, put, {{0, 0, 1000}}, "never")).status, Status::kStale);
  EXPECT_EQ(a.done(a.put(peer, put, {{0, 0, a.size()}})).status, Status::kStale);
  EXPECT_EQ(a.done(a.pull(peer, pull, {{0, 0, 1000}})).status, Status::kStale);
  EXPECT_TRUE(b.holds(20, 0, b.size()));
  // Nothing but these is harmed, and no notice came.
  EXPECT_EQ(a.done(a.put(peer, other, {{0, 0, 1000}}, "this one")).status, Status::kOk);
  const auto notice = b.next(Event::Kind::kNotice);
  ASSERT_TRUE(notice);
  EXPECT_EQ(notice->text, "this one");
}

TEST_P(LinkContract, RemovedRegionsWindowsAreStale) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  auto memory = std::make_shared<std::vector<std::byte>>(1000);
  RegionPtr region = b->add_region(Bytes(*memory), memory);
  const Advert window = b->advertise(region, 0, 1000, WindowAccess::kPut);
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 1000}})).status, Status::kOk);
  EXPECT_GT(memory.use_count(), 1);
  b->remove_region(region);
  region.reset();
  EXPECT_EQ(memory.use_count(), 1);
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 1000}})).status, Status::kStale);
}

TEST_P(LinkContract, OutOfRangeIsRefused) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  b.fill(21);
  const Advert put = b->advertise(b.region(), 1000, 100, WindowAccess::kPut);
  const Advert pull = b->advertise(b.region(), 1000, 100, WindowAccess::kPull);
  EXPECT_EQ(a.done(a.put(peer, put, {{0, 1, 100}})).status, Status::kRefused);
  EXPECT_EQ(a.done(a.put(peer, put, {{0, ~0ull, 2}})).status, Status::kRefused);
  EXPECT_EQ(a.done(a.put(peer, pull, {{0, 0, 10}})).status, Status::kRefused);
  EXPECT_EQ(a.done(a.pull(peer, pull, {{0, 101, 1}})).status, Status::kRefused);
  EXPECT_EQ(a.done(a.pull(peer, put, {{0, 0, 10}})).status, Status::kRefused);
  EXPECT_TRUE(b.holds(21, 0, b.size()));
  EXPECT_EQ(a.done(a.put(peer, put, {{0, 99, 1}, {0, 100, 0}})).status, Status::kOk);
}

// A sender that does not check by itself: the receiver does.
TEST_P(LinkContract, ForgedAdvertsAreRefused) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  b.fill(22);
  const Advert real = b->advertise(b.region(), 1000, 100, WindowAccess::kPut);
  Advert longer = real;
  longer.length = 1 << 20;
  EXPECT_EQ(a.done(a.put(peer, longer, {{0, 0, 100}, {0, 100, 1}})).status, Status::kRefused);
  EXPECT_EQ(a.done(a.put(peer, longer, {{0, 5000, 200'000}})).status, Status::kRefused);
  Advert other = real;
  other.generation += 1;
  EXPECT_EQ(a.done(a.put(peer, other, {{0, 0, 10}})).status, Status::kStale);
  other = real;
  other.window += 1000;
  EXPECT_EQ(a.done(a.put(peer, other, {{0, 0, 10}})).status, Status::kStale);
  for (size_t i = 0; i < b.size(); ++i) {
    if (i < 1000 || i >= 1100) {
      ASSERT_EQ(b.data()[i], Node::pattern(22, i)) << i;
    }
  }
  EXPECT_EQ(a.done(a.put(peer, real, {{0, 0, 100}})).status, Status::kOk);
}

TEST_P(LinkContract, AdvertsOfAnEarlierLifeAreStale) {
  Node a = node("a");
  auto first = std::make_unique<Node>(GetParam(), "b");
  const Advert old = first->window();
  first.reset();
  Node second = node("b");
  second.fill(23);
  second.window();
  const PeerId peer = a.connect(second->address());
  EXPECT_EQ(a.done(a.put(peer, old, {{0, 0, 1000}})).status, Status::kStale);
  EXPECT_TRUE(second.holds(23, 0, second.size()));
}

TEST_P(LinkContract, NothingIsWrittenAfterWithdraw) {
  constexpr size_t kBytes = 32 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  const PeerId peer = a.connect(b->address());
  for (int round = 0; round < 6; ++round) {
    const Advert window = b.window();
    std::memset(b.data(), 0, kBytes);
    std::memset(a.data(), 1, kBytes);
    const OpId op = a.put(peer, window, {{0, 0, kBytes}}, "done");
    b.wait_for_byte(kBytes / 16 * static_cast<size_t>(round));
    b->withdraw(window);
    std::memset(b.data(), 2, kBytes);
    const Event event = a.done(op);
    EXPECT_TRUE(event.status == Status::kStale || event.status == Status::kPeerLost ||
                event.status == Status::kOk)
        << event.text;
    if (event.status == Status::kPeerLost) return;  // the contract allows it
    a.done(a->flush(peer, in(kPatience)));
    ASSERT_EQ(b.data()[0], std::byte{2});
    ASSERT_EQ(std::memcmp(b.data(), b.data() + 1, kBytes - 1), 0) << "not all bytes are alike";
  }
}

TEST_P(LinkContract, WithdrawStopsPulls) {
  constexpr size_t kBytes = 32 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window(WindowAccess::kPull), other = b.window(WindowAccess::kPull);
  std::memset(b.data(), 1, kBytes);
  std::memset(a.data(), 0, kBytes);
  const OpId op = a.pull(peer, window, {{0, 0, kBytes}});
  a.wait_for_byte(0);
  b->withdraw(window);
  const Event event = a.done(op);
  EXPECT_TRUE(event.status == Status::kStale || event.status == Status::kOk ||
              event.status == Status::kPeerLost)
      << event.text;
  if (event.status != Status::kPeerLost) {
    EXPECT_EQ(a.done(a.pull(peer, other, {{0, 0, kBytes}})).status, Status::kOk);
  }
}

// ---- deadlines and deaths

TEST_P(LinkContract, DeadlinesHoldAgainstAPeerThatStandsStill) {
  constexpr size_t kBytes = 32 << 20;
  PeerProcess child = process(kBytes);
  Node a = node("a", kBytes);
  const PeerId peer = a.connect(child.address);
  EXPECT_EQ(a.done(a.put(peer, child.put_window, {{0, 0, 10}})).status, Status::kOk);
  child.stop();
  const Deadline begun = Clock::now();
  std::vector<OpId> ops = {a.put(peer, child.put_window, {{0, 0, kBytes}}, "late", 300ms),
                           a.put(peer, child.put_window, {{0, 0, 10}}, "late", 300ms),
                           a.pull(peer, child.pull_window, {{0, 0, kBytes}}, 300ms),
                           a->notify(peer, "late", in(300ms))};
  const OpId flush = a->flush(peer, in(kPatience));
  for (const OpId op : ops) EXPECT_EQ(a.done(op).status, Status::kTimeout);
  EXPECT_EQ(a.done(flush).status, Status::kOk);  // what it waited for has ended
  EXPECT_LT(Clock::now() - begun, 10s);
  child.signal(SIGCONT);
}

TEST_P(LinkContract, DeadlinesThatAreOver) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 10}}, {}, -1s)).status, Status::kTimeout);
  EXPECT_EQ(a.done(a->connect(b->address(), in(-1s))).status, Status::kTimeout);
  EXPECT_EQ(a.done(a->put(peer, window, a.region(), {}, {}, Deadline::max())).status, Status::kOk);
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 10}})).status, Status::kOk);
}

// A peer that was only slow: what comes after the deadline must not go where it was to go.
TEST_P(LinkContract, LocalMemoryIsLeftAloneAfterTheEnd) {
  constexpr size_t kBytes = 16 << 20;
  PeerProcess child = process(kBytes);
  ASSERT_EQ(child.ask("fill 30"), "ok");
  Node a = node("a", kBytes);
  const PeerId peer = a.connect(child.address);
  // Sources of their own, which are unreadable after the end.
  void* const source =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(source, MAP_FAILED);
  std::memset(source, 1, kBytes);
  RegionPtr region = a->add_region(Bytes(static_cast<std::byte*>(source), kBytes), nullptr);
  for (const auto time : {20ms, 100ms, 300ms}) {
    child.stop();
    const Piece all{0, 0, kBytes};
    const OpId put = a->put(peer, child.put_window, region, {&all, 1}, "late", in(time));
    const OpId pull = a.pull(peer, child.pull_window, {all}, time);
    EXPECT_EQ(a.done(put).status, Status::kTimeout);
    EXPECT_EQ(a.done(pull).status, Status::kTimeout);
    ::mprotect(source, kBytes, PROT_NONE);
    a.fill(31);
    child.signal(SIGCONT);
    if (a.done(a->flush(peer, in(kPatience))).status == Status::kPeerLost) break;
    // Where the connection lives on, it is as good as before.
    const OpId again = a.pull(peer, child.pull_window, {{0, 0, 1000}});
    if (a.done(again).status == Status::kPeerLost) break;
    ::mprotect(source, kBytes, PROT_READ | PROT_WRITE);
    EXPECT_TRUE(a.holds(31, 1000, kBytes - 1000));
  }
  a->remove_region(region);
  region.reset();
  a.destroy();
  ::munmap(source, kBytes);
}

TEST_P(LinkContract, ConnectToNobody) {
  Node a = node("a");
  std::string address;
  {
    Node b = node("b");
    address = b->address();
  }
  const Deadline begun = Clock::now();
  const Event event = a.done(a->connect(address, in(5s)));
  EXPECT_TRUE(event.status == Status::kPeerLost || event.status == Status::kTimeout) << event.text;
  EXPECT_LT(Clock::now() - begun, 20s);
  EXPECT_FALSE(event.text.empty());
}

TEST_P(LinkContract, UnknownPeers) {
  Node a = node("a"), b = node("b");
  const Advert window = b.window();
  EXPECT_EQ(a.done(a.put(12345, window, {{0, 0, 10}})).status, Status::kPeerLost);
  EXPECT_EQ(a.done(a->notify(0, "n", in(1s))).status, Status::kPeerLost);
  EXPECT_EQ(a.done(a->flush(12345, in(1s))).status, Status::kPeerLost);
  a->disconnect(12345, in(1s));
}

TEST_P(LinkContract, PeerKilledInThePutsMiddle) {
  constexpr size_t kBytes = 64 << 20;
  for (const auto wait : {0ms, 5ms, 20ms}) {
    PeerProcess child = process(kBytes);
    Node a = node("a", kBytes);
    const PeerId peer = a.connect(child.address);
    std::vector<OpId> ops;
    for (int i = 0; i < 8; ++i) {
      ops.push_back(a.put(peer, child.put_window, {{0, 0, kBytes}}, "n", 20s));
      ops.push_back(a.pull(peer, child.pull_window, {{0, 0, kBytes}}, 20s));
    }
    ops.push_back(a->flush(peer, in(20s)));
    std::this_thread::sleep_for(wait);
    child.kill();
    size_t lost = 0;
    for (const OpId op : ops) {
      const Event event = a.done(op);
      EXPECT_TRUE(event.status == Status::kPeerLost || event.status == Status::kOk ||
                  event.status == Status::kTimeout);
      lost += event.status != Status::kOk;
    }
    EXPECT_GT(lost, 0u);
    const auto event = a.next(Event::Kind::kPeerLost, peer);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->status, Status::kPeerLost);
    EXPECT_FALSE(event->text.empty());
    EXPECT_EQ(a.done(a.put(peer, child.put_window, {{0, 0, 10}})).status, Status::kPeerLost);
    EXPECT_FALSE(a.next(Event::Kind::kPeerLost, peer, 50ms)) << "told twice";
  }
}

TEST_P(LinkContract, SenderKilledInThePutsMiddle) {
  constexpr size_t kBytes = 16 << 20;
  Node b = node("b", kBytes);
  for (int round = 0; round < 3; ++round) {
    PeerProcess child = process(kBytes);
    ASSERT_EQ(child.ask("fill 40"), "ok");
    const Advert window = b.window();
    ASSERT_EQ(child.ask("put " + b->address() + " " + to_hex(window.encode())), "ok");
    const auto connected = b.next(Event::Kind::kPeerConnected);
    ASSERT_TRUE(connected);
    for (int i = 0; i <= round; ++i) ASSERT_TRUE(b.next(Event::Kind::kNotice));
    child.kill();
    const auto lost = b.next(Event::Kind::kPeerLost, connected->peer);
    ASSERT_TRUE(lost);
    EXPECT_EQ(lost->status, Status::kPeerLost);
    b->withdraw(window);
    b.events.clear();
  }
  Node a = node("a");
  const PeerId peer = a.connect(b->address());
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, 1000}})).status, Status::kOk);
}

TEST_P(LinkContract, OnePeersDeathIsNoOtherOnes) {
  constexpr size_t kBytes = 8 << 20;
  Node a = node("a", kBytes), c = node("c", kBytes);
  auto child = std::make_unique<PeerProcess>(GetParam(), kBytes);
  const PeerId first = a.connect(child->address), second = a.connect(c->address());
  const Advert window = c.window();
  std::vector<OpId> ops;
  for (int i = 0; i < 10; ++i) {
    a.put(first, child->put_window, {{0, 0, kBytes}}, {}, 20s);
    ops.push_back(a.put(second, window, {{0, 0, kBytes}}));
    if (i == 5) child->kill();
  }
  for (const OpId op : ops) EXPECT_EQ(a.done(op).status, Status::kOk);
}

TEST_P(LinkContract, SlowReader) {
  constexpr size_t kBytes = 24 << 20;
  PeerProcess child = process(kBytes);
  Node a = node("a", kBytes);
  a.fill(50);
  const PeerId peer = a.connect(child.address);
  std::vector<OpId> ops = {a.put(peer, child.put_window, {{0, 0, kBytes}})};
  for (int i = 0; i < 2000; ++i) {
    ops.push_back(a.put(peer, child.put_window, {{0, 0, 64}}, "small"));
    if (i % 400 == 0) {
      child.stop();
      std::this_thread::sleep_for(30ms);
      child.signal(SIGCONT);
      std::this_thread::sleep_for(5ms);
    }
  }
  for (const OpId op : ops) ASSERT_EQ(a.done(op).status, Status::kOk);
  EXPECT_EQ(child.ask("check 50 0 " + std::to_string(kBytes)), "yes");
}

// ---- many at a time

TEST_P(LinkContract, ConcurrentSubmitters) {
  constexpr size_t kSlot = 40'000, kThreads = 4, kOps = 200;
  Node a = node("a", kSlot * kThreads * kOps), b = node("b", kSlot * kThreads * kOps);
  a.fill(60);
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  struct Counting : EventSink {
    std::atomic<size_t> ok = 0, ended = 0;
    void on_event(const Event& event) override {
      ok += event.status == Status::kOk;
      ended += 1;
    }
  } sink;
  std::vector<std::thread> threads;
  std::atomic<size_t> expected_bytes = 0;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (size_t i = 0; i < kOps; ++i) {
        const uint64_t at = (t * kOps + i) * kSlot, length = random() % kSlot;
        expected_bytes += length;
        a.put(peer, window, {{at, at, length}}, i % 7 == 0 ? "n" : "", kPatience, &sink);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Deadline deadline = in(kPatience);
  while (sink.ended < kThreads * kOps && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(sink.ok, kThreads * kOps);
  for (size_t t = 0; t < kThreads; ++t) {
    std::mt19937_64 random(t);
    for (size_t i = 0; i < kOps; ++i) {
      const uint64_t at = (t * kOps + i) * kSlot;
      ASSERT_TRUE(b.holds(60, at, random() % kSlot));
    }
  }
  const auto counters = a->counters();
  ASSERT_EQ(counters.size(), 1u);
  EXPECT_EQ(counters[0].name, "b");
  EXPECT_EQ(counters[0].puts, kThreads * kOps);
  EXPECT_EQ(counters[0].failures, 0u);
  EXPECT_EQ(counters[0].bytes_put, expected_bytes);
  ASSERT_EQ(b->counters().size(), 1u);
  EXPECT_EQ(b->counters()[0].bytes_received, expected_bytes);
  EXPECT_EQ(b->counters()[0].notices, kThreads * ((kOps + 6) / 7));
}

TEST_P(LinkContract, ManyPeers) {
  constexpr size_t kPeers = 24, kBytes = 200'000;
  Node hub = node("hub", kPeers * kBytes);
  const Advert window = hub.window(), pull = hub.window(WindowAccess::kPull);
  std::vector<std::unique_ptr<Node>> peers;
  std::vector<OpId> ops;
  for (size_t i = 0; i < kPeers; ++i) {
    peers.push_back(std::make_unique<Node>(GetParam(), "peer " + std::to_string(i), kBytes));
    peers[i]->fill(i);
    const PeerId peer = peers[i]->connect(hub->address());
    ops.push_back(peers[i]->put(peer, window, {{0, i * kBytes, kBytes}}, "there"));
  }
  for (size_t i = 0; i < kPeers; ++i) {
    ASSERT_EQ(peers[i]->done(ops[i]).status, Status::kOk);
    ASSERT_TRUE(hub.holds(i, i * kBytes, kBytes, 0));
    ASSERT_TRUE(hub.next(Event::Kind::kNotice));
  }
  EXPECT_EQ(hub->counters().size(), kPeers);
  (void)pull;
}

TEST_P(LinkContract, TwoWaysAtOnce) {
  constexpr size_t kBytes = 8 << 20;
  Node a = node("a", 2 * kBytes), b = node("b", 2 * kBytes);
  const PeerId to_b = a.connect(b->address());
  const auto connected = b.next(Event::Kind::kPeerConnected);
  ASSERT_TRUE(connected);
  a.fill(70);
  b.fill(71);
  const Advert a_put = a->advertise(a.region(), kBytes, kBytes, WindowAccess::kPut);
  const Advert b_put = b->advertise(b.region(), kBytes, kBytes, WindowAccess::kPut);
  std::vector<OpId> ours, theirs;
  for (int i = 0; i < 6; ++i) {
    ours.push_back(a.put(to_b, b_put, {{0, 0, kBytes}}, "x"));
    theirs.push_back(b.put(connected->peer, a_put, {{0, 0, kBytes}}, "y"));
  }
  for (const OpId op : ours) EXPECT_EQ(a.done(op).status, Status::kOk);
  for (const OpId op : theirs) EXPECT_EQ(b.done(op).status, Status::kOk);
  EXPECT_TRUE(a.holds(71, kBytes, kBytes, 0));
  EXPECT_TRUE(b.holds(70, kBytes, kBytes, 0));
}

// ---- events

TEST_P(LinkContract, SinksGetTheirOwn) {
  Node a = node("a"), b = node("b");
  struct Keeping : EventSink {
    std::mutex mutex;
    std::vector<Event> events;
    void on_event(const Event& event) override {
      const std::lock_guard lock(mutex);
      events.push_back(event);
    }
    size_t size() {
      const std::lock_guard lock(mutex);
      return events.size();
    }
  } ops, weights, all_of_w;
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  b->route_notices("w", &all_of_w);
  b->route_notices("weights/", &weights);
  a.put(peer, window, {{0, 0, 10}}, "weights/1", kPatience, &ops);
  a->notify(peer, "queue/1", in(kPatience), &ops);
  a->notify(peer, "weird", in(kPatience), &ops);
  a->flush(peer, in(kPatience), &ops);
  const Deadline deadline = in(kPatience);
  while (ops.size() < 4 && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(ops.size(), 4u);
  EXPECT_TRUE(a.events.empty());
  const auto notice = b.next(Event::Kind::kNotice);
  ASSERT_TRUE(notice);
  EXPECT_EQ(notice->text, "queue/1");
  ASSERT_EQ(weights.size(), 1u);
  EXPECT_EQ(weights.events[0].text, "weights/1");
  ASSERT_EQ(all_of_w.size(), 1u);
  EXPECT_EQ(all_of_w.events[0].text, "weird");
  b->route_notices("weights/", nullptr);
  b->route_notices("w", nullptr);
  a->notify(peer, "weights/2", in(kPatience));
  ASSERT_TRUE(b.next(Event::Kind::kNotice));
  EXPECT_EQ(weights.size(), 1u);
}

// A sink that answers: what a relay does.
TEST_P(LinkContract, SinksMaySubmit) {
  Node a = node("a"), b = node("b");
  a.fill(80);
  const PeerId peer = a.connect(b->address());
  const auto connected = b.next(Event::Kind::kPeerConnected);
  ASSERT_TRUE(connected);
  struct Answering : EventSink {
    Node* node = nullptr;
    Advert into;
    void on_event(const Event& event) override {
      if (event.kind == Event::Kind::kNotice) {
        node->put(event.peer, into, {{0, 1000, 100}}, "answer", kPatience, this);
      }
    }
  } sink;
  sink.node = &b;
  sink.into = a.window();
  b->route_notices("ask", &sink);
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, 100}}, "ask")).status, Status::kOk);
  ASSERT_TRUE(a.next(Event::Kind::kNotice));
  EXPECT_TRUE(a.holds(80, 1000, 100, 0));
  b->close(in(kPatience));
}

TEST_P(LinkContract, DescriptorIsReadableWhileThereAreEvents) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  a->poll();
  const auto readable = [&](int patience_ms) {
    pollfd polled{a->fd(), POLLIN, 0};
    return ::poll(&polled, 1, patience_ms) == 1;
  };
  EXPECT_FALSE(readable(0));
  a->flush(peer, in(kPatience));
  a->flush(peer, in(kPatience));
  EXPECT_TRUE(readable(60'000));
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(a->poll().size(), 2u);
  EXPECT_FALSE(readable(0));
}

TEST_P(LinkContract, MistakesOfCallersRaise) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window(), pull = b.window(WindowAccess::kPull);
  EXPECT_THROW(a.put(peer, window, {{a.size(), 0, 1}}), LinkError);
  EXPECT_THROW(a.put(peer, window, {{~0ull, 0, 2}}), LinkError);
  EXPECT_THROW(a.pull(peer, pull, {{a.size() - 1, 0, 2}}), LinkError);
  EXPECT_THROW(a.put(peer, window, {}, std::string(kMaxNoticeBytes + 1, 'n')), LinkError);
  EXPECT_THROW(a->notify(peer, std::string(kMaxNoticeBytes + 1, 'n'), in(1s)), LinkError);
  EXPECT_THROW(a->advertise(a.region(), a.size(), 1, WindowAccess::kPut), LinkError);
  EXPECT_THROW(a->connect("nonsense", in(1s)), LinkError);
  EXPECT_THROW(a->connect(GetParam() + ":127.0.0.1:notaport", in(1s)), LinkError);
  EXPECT_THROW(a->connect(GetParam() + ":127.0.0.1", in(1s)), LinkError);
  EXPECT_THROW(make_endpoint(GetParam(), "x")->connect("xcp:127.0.0.1:80", in(1s)), LinkError);
  EXPECT_EQ(a.done(a->notify(peer, std::string(kMaxNoticeBytes, 'n'), in(kPatience))).status,
            Status::kOk);
}

// ---- the end

TEST_P(LinkContract, CloseWaitsForWhatIsUnderWay) {
  constexpr size_t kBytes = 16 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  a.fill(90);
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  std::vector<OpId> ops;
  for (int i = 0; i < 4; ++i) ops.push_back(a.put(peer, window, {{0, 0, kBytes}}, "n"));
  EXPECT_TRUE(a->close(in(kPatience)));
  EXPECT_TRUE(b.holds(90, 0, kBytes));
  for (const OpId op : ops) EXPECT_EQ(a.done(op).status, Status::kOk);
  EXPECT_EQ(a.done(a.put(peer, window, {{0, 0, 10}})).status, Status::kClosed);
  EXPECT_EQ(a.done(a->connect(b->address(), in(1s))).status, Status::kClosed);
  EXPECT_EQ(a.done(a->flush(peer, in(1s))).status, Status::kClosed);
  EXPECT_TRUE(a->close(in(1s)));
  const auto lost = a.next(Event::Kind::kPeerLost, peer);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->status, Status::kClosed);
  // The other side hears goodbye, no more.
  const auto gone = b.next(Event::Kind::kPeerLost);
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->status, Status::kClosed) << gone->text;
  EXPECT_EQ(b.done(b.put(gone->peer, window, {{0, 0, 10}})).status, Status::kPeerLost);
}

TEST_P(LinkContract, CloseServesPeersUntilTheyAreDone) {
  constexpr size_t kBytes = 32 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes);
  a.fill(91);
  b.fill(92);
  const PeerId peer = a.connect(b->address());
  const OpId put = a.put(peer, b.window(), {{0, 0, kBytes / 2}});
  const OpId pull =
      a.pull(peer, b.window(WindowAccess::kPull), {{kBytes / 2, kBytes / 2, kBytes / 2}});
  const OpId last = a.put(peer, b.window(), {{0, 0, 1000}}, "under way");
  ASSERT_TRUE(b.next(Event::Kind::kNotice));  // so all were under way
  EXPECT_TRUE(b->close(in(kPatience)));
  for (const OpId op : {put, pull, last}) EXPECT_EQ(a.done(op).status, Status::kOk);
  EXPECT_TRUE(a.holds(92, kBytes / 2, kBytes / 2));
  EXPECT_TRUE(b.holds(91, 0, kBytes / 2));
}

// Goodbye means that nothing new begins: a peer that has always more to send does not hold it up.
TEST_P(LinkContract, CloseEndsThoughAPeerHasMore) {
  Node a = node("a"), b = node("b");
  const PeerId peer = a.connect(b->address());
  const Advert window = b.window();
  bool closed = false;
  std::thread thread([&] { closed = b->close(in(kPatience)); });
  Event event;
  const Deadline deadline = in(kPatience);
  OpId next = a.put(peer, window, {{0, 0, a.size()}});
  do {  // never without one under way
    const OpId op = std::exchange(next, a.put(peer, window, {{0, 0, a.size()}}));
    event = a.done(op);
  } while (event.status == Status::kOk && Clock::now() < deadline);
  thread.join();
  EXPECT_TRUE(closed);
  EXPECT_EQ(event.status, Status::kPeerLost) << event.text;
  EXPECT_EQ(a.done(next).status, Status::kPeerLost);
}

TEST_P(LinkContract, BothCloseAtOnce) {
  for (int round = 0; round < 5; ++round) {
    Node a = node("a"), b = node("b");
    const PeerId peer = a.connect(b->address());
    a.put(peer, b.window(), {{0, 0, a.size()}}, "n");
    bool other = false;
    std::thread thread([&] { other = b->close(in(kPatience)); });
    EXPECT_TRUE(a->close(in(kPatience)));
    thread.join();
    EXPECT_TRUE(other);
  }
}

TEST_P(LinkContract, CloseDoesNotWaitForEver) {
  constexpr size_t kBytes = 32 << 20;
  PeerProcess child = process(kBytes);
  Node a = node("a", kBytes);
  const PeerId peer = a.connect(child.address);
  child.stop();
  const OpId op = a.put(peer, child.put_window, {{0, 0, kBytes}});
  const Deadline begun = Clock::now();
  EXPECT_FALSE(a->close(in(300ms)));
  EXPECT_LT(Clock::now() - begun, 10s);
  EXPECT_EQ(a.done(op).status, Status::kClosed);
}

TEST_P(LinkContract, DisconnectEndsOperationsOfOnePeer) {
  constexpr size_t kBytes = 64 << 20;
  Node a = node("a", kBytes), b = node("b", kBytes), c = node("c");
  const PeerId to_b = a.connect(b->address()), to_c = a.connect(c->address());
  const Advert window = b.window();
  std::vector<OpId> ops;
  for (int i = 0; i < 4; ++i) {
    ops.push_back(a.put(to_b, window, {{0, 0, kBytes}}, "never"));
    ops.push_back(a.pull(to_b, b.window(WindowAccess::kPull), {{0, 0, kBytes}}));
  }
  ops.push_back(a->flush(to_b, in(kPatience)));
  a->disconnect(to_b, in(kPatience));
  size_t closed = 0;
  for (const OpId op : ops) {
    const Event event = a.done(op);
    EXPECT_TRUE(event.status == Status::kClosed || event.status == Status::kOk) << event.text;
    closed += event.status == Status::kClosed;
  }
  EXPECT_GT(closed, 0u);
  const auto ours = a.next(Event::Kind::kPeerLost, to_b), theirs = b.next(Event::Kind::kPeerLost);
  ASSERT_TRUE(ours && theirs);
  EXPECT_EQ(ours->status, Status::kClosed) << ours->text;
  EXPECT_EQ(theirs->status, Status::kClosed) << theirs->text;
  EXPECT_EQ(a.done(a.put(to_c, c.window(), {{0, 0, 10}})).status, Status::kOk);
  // And again from the start.
  const PeerId again = a.connect(b->address());
  EXPECT_NE(again, to_b);
  EXPECT_EQ(a.done(a.put(again, window, {{0, 0, 10}})).status, Status::kOk);
}

TEST_P(LinkContract, DestructionWithTrafficEndsIt) {
  constexpr size_t kBytes = 16 << 20;
  Node b = node("b", kBytes);
  const Advert window = b.window();
  for (int round = 0; round < 4; ++round) {
    Node a = node("a", kBytes);
    const PeerId peer = a.connect(b->address());
    for (int i = 0; i < 3; ++i) a.put(peer, window, {{0, 0, kBytes}}, "n");
    if (round % 2 == 1) std::this_thread::sleep_for(3ms);
    a.destroy();
  }
}

TEST_P(LinkContract, NoDescriptorIsLeft) {
  const auto life = [&] {
    Node a = node("a"), b = node("b");
    const PeerId peer = a.connect(b->address());
    EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, 1000}})).status, Status::kOk);
    a.done(a->connect(GetParam() + ":127.0.0.1:1", in(5s)));
    a->disconnect(peer, in(kPatience));
    a.next(Event::Kind::kPeerLost, peer);
    a.connect(b->address());
  };
  life();
  const size_t before = num_descriptors();
  for (int i = 0; i < 5; ++i) life();
  EXPECT_LE(num_descriptors(), before);
}

INSTANTIATE_TEST_SUITE_P(Links, LinkContract, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const Transport& transport : transports())
                             names.push_back(transport.name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace psrl::link::testing
