// The tcp transport against strangers and against peers that break the protocol.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <random>

#include "base/errors.h"
#include "base/fd.h"
#include "link/auth.h"
#include "link/frame.h"
#include "link/tcp_socket.h"
#include "link_testing.h"

namespace psrl::link::testing {
namespace {

// A hand-made peer on a plain, blocking socket.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address, const std::string& token = kToken)
      : target_(tcp::parse_address(address)),
        socket_(::socket(target_.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)),
        handshake_(Handshake::Role::kClient, token, "raw", target_.text()) {
    const timeval patience{20, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&target_.storage),
                        target_.length),
              0);
  }

  bool shake_hands() {
    std::string input;
    while (handshake_.state() == Handshake::State::kGoing) {
      send(handshake_.output());
      const std::string got = receive(4096);
      if (got.empty()) return false;
      input += got;
      input.erase(0, handshake_.feed(input));
    }
    send(handshake_.output());
    return handshake_.state() == Handshake::State::kDone;
  }
  const std::string& reason() const { return handshake_.reason(); }
  std::string hello() { return handshake_.output(); }

  bool send(const std::string& bytes) {
    return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // What there is, at most so many bytes; nothing when the other side hung up.
  std::string receive(size_t bytes) {
    std::string got(bytes, '\0');
    const ssize_t result = ::recv(socket_.get(), got.data(), got.size(), 0);
    got.resize(result > 0 ? static_cast<size_t>(result) : 0);
    return got;
  }
  // The next frame, without a payload; its body.
  FrameHeader frame(std::string* body = nullptr) {
    std::string bytes;
    while (bytes.size() < kFrameHeaderBytes) {
      const std::string got = receive(kFrameHeaderBytes - bytes.size());
      if (got.empty()) throw LinkError("hung up");
      bytes += got;
    }
    const FrameHeader header = FrameHeader::decode(bytes);
    std::string rest;
    while (rest.size() < header.body) rest += receive(header.body - rest.size());
    if (body != nullptr) *body = rest;
    return header;
  }
  bool hung_up() {
    while (true) {
      char bytes[4096];
      const ssize_t got = ::recv(socket_.get(), bytes, sizeof(bytes), 0);
      if (got == 0) return true;
      if (got < 0) return errno == ECONNRESET;
    }
  }
  void close() { socket_ = Fd(); }

 private:
  tcp::SocketAddress target_;
  Fd socket_;
  Handshake handshake_;
};

Node tcp_node(const std::string& name, size_t bytes = 1 << 20) { return {"tcp", name, bytes}; }

// The node still serves who behaves.
void expect_alive(Node& node) {
  Node other = tcp_node("other");
  const PeerId peer = other.connect(node->address());
  EXPECT_EQ(other.done(other->notify(peer, "alive", in(kPatience))).status, Status::kOk);
}

std::string put_frame(const Advert& window, uint64_t id, std::vector<Range> ranges,
                      const std::string& payload) {
  return encode_ranges(FrameType::kPut, id, window.window, window.generation, ranges) + payload;
}

TEST(LinkTcp, WrongTokenIsRefusedByName) {
  Node a = tcp_node("a");
  const auto other = make_tcp_endpoint({"b", "127.0.0.1", 0, "some other token, as long"});
  const Event event = a.done(a->connect(other->address(), in(kPatience)));
  EXPECT_EQ(event.status, Status::kRefused);
  EXPECT_NE(event.text.find("token"), std::string::npos) << event.text;
  EXPECT_TRUE(other->poll().empty());

  RawPeer raw(a->address(), "not the token at all");
  EXPECT_FALSE(raw.shake_hands());
  EXPECT_FALSE(a.next(Event::Kind::kPeerConnected, 0, 50ms));
}

TEST(LinkTcp, ShortTokensAndOpenAddressesRaise) {
  EXPECT_THROW(make_tcp_endpoint({"a", "127.0.0.1", 0, "short"}), LinkError);
  EXPECT_THROW(make_tcp_endpoint({"a", "0.0.0.0", 0, kToken}), LinkError);
  EXPECT_THROW(make_tcp_endpoint({"a", "::", 0, kToken}), LinkError);
  EXPECT_THROW(make_tcp_endpoint({"a", "no.such.host.invalid", 0, kToken}), LinkError);
  EXPECT_THROW(make_tcp_endpoint({"a", "192.0.2.1", 0, kToken}), LinkError);  // not of this host
  const auto first = make_tcp_endpoint({"a", "127.0.0.1", 0, kToken});
  const auto port = std::stoi(first->address().substr(first->address().rfind(':') + 1));
  try {
    make_tcp_endpoint({"a", "127.0.0.1", static_cast<uint16_t>(port), kToken});
    ADD_FAILURE() << "two on one port";
  } catch (const LinkError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(port)), std::string::npos);
  }
}

TEST(LinkTcp, Ipv6) {
  std::unique_ptr<Endpoint> a, b;
  try {
    a = make_tcp_endpoint({"a", "::1", 0, kToken});
    b = make_tcp_endpoint({"b", "::1", 0, kToken});
  } catch (const LinkError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_TRUE(a->address().starts_with("tcp:[::1]:")) << a->address();
  a->connect(b->address(), in(kPatience));
  pollfd polled{a->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  const auto events = a->poll();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].status, Status::kOk) << events[0].text;
}

TEST(LinkTcp, AddressesAreRead) {
  EXPECT_EQ(tcp::parse_address("tcp:10.77.0.1:4711").text(), "10.77.0.1:4711");
  EXPECT_EQ(tcp::parse_address("tcp:[2001:db8::1]:2").text(), "[2001:db8::1]:2");
  for (const auto* bad :
       {"", "tcp:", "tcp::", "tcp:1.2.3.4", "tcp:1.2.3.4:", "tcp:1.2.3.4:0", "tcp:1.2.3.4:65536",
        "tcp:1.2.3.4:1x", "ucx:1.2.3.4:1", "1.2.3.4:1", "tcp:[::1:5", "tcp:host.name:5"}) {
    EXPECT_THROW(tcp::parse_address(bad), LinkError) << bad;
  }
}

TEST(LinkTcp, GarbageInsteadOfAHandshake) {
  Node a = tcp_node("a");
  std::mt19937_64 random(1);
  for (int i = 0; i < 30; ++i) {
    RawPeer raw(a->address());
    std::string garbage = i % 2 ? raw.hello() : "";
    for (uint64_t left = random() % 3000; left > 0; --left) {
      garbage += static_cast<char>(random());
    }
    raw.send(garbage);
    if (i % 3 == 0) raw.close();
    if (i == 4) {
      EXPECT_TRUE(raw.hung_up());
    }
  }
  RawPeer http(a->address());
  http.send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(http.hung_up());
  expect_alive(a);
  // Only the one that behaved was ever a peer.
  ASSERT_TRUE(a.next(Event::Kind::kPeerConnected));
  EXPECT_FALSE(a.next(Event::Kind::kPeerConnected, 0, 20ms));
}

TEST(LinkTcp, StrangersAreFewAndNotForLong) {
  Node a = tcp_node("a");
  std::vector<std::unique_ptr<RawPeer>> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(std::make_unique<RawPeer>(a->address()));
    strangers.back()->send(strangers.back()->hello().substr(0, 10));
  }
  expect_alive(a);  // they do not lock others out
  EXPECT_TRUE(strangers.front()->hung_up());
  const Deadline begun = Clock::now();
  EXPECT_TRUE(strangers.back()->hung_up());  // by their time limit
  EXPECT_LT(Clock::now() - begun, 20s);
}

TEST(LinkTcp, NoAnswerToAHandshake) {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  Node a = tcp_node("a");
  const std::string silent = "tcp:" + tcp::local_address(listener.get()).text();
  const Event event = a.done(a->connect(silent, in(200ms)));
  EXPECT_EQ(event.status, Status::kTimeout);
  EXPECT_NE(event.text.find(silent.substr(4)), std::string::npos) << event.text;
}

TEST(LinkTcp, RawPeerIsServedLikeAnyOther) {
  Node a = tcp_node("a");
  const Advert window = a->advertise(a.region(), 100, 50, WindowAccess::kPut);
  RawPeer raw(a->address());
  ASSERT_TRUE(raw.shake_hands());
  raw.send(put_frame(window, 1, {{10, 5}, {30, 3}}, "hellothe") +
           encode_put_end(1, window.window, window.generation, "n"));
  const FrameHeader ack = raw.frame();
  EXPECT_EQ(ack.type, FrameType::kAck);
  EXPECT_EQ(ack.status, Status::kOk);
  EXPECT_EQ(std::memcmp(a.data() + 110, "hello", 5), 0);
  EXPECT_EQ(std::memcmp(a.data() + 130, "the", 3), 0);
  EXPECT_TRUE(a.next(Event::Kind::kNotice));
  raw.send(encode_empty(FrameType::kGoodbye, 0));
  EXPECT_EQ(raw.frame().type, FrameType::kGoodbye);
  EXPECT_TRUE(raw.hung_up());
  const auto lost = a.next(Event::Kind::kPeerLost);
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->status, Status::kClosed);
}

TEST(LinkTcp, WhatIsOutsideOfTheWindowIsNotTaken) {
  Node a = tcp_node("a");
  a.fill(1);
  const Advert window = a->advertise(a.region(), 1000, 100, WindowAccess::kPut);
  RawPeer raw(a->address());
  ASSERT_TRUE(raw.shake_hands());
  uint64_t id = 0;
  const auto refused = [&](const Advert& advert, const std::vector<Range>& ranges, Status status) {
    uint64_t bytes = 0;
    for (const Range& range : ranges) bytes += range.length;
    ++id;
    raw.send(put_frame(advert, id, ranges, std::string(bytes, 'x')));
    const FrameHeader ack = raw.frame();
    EXPECT_EQ(ack.type, FrameType::kAck);
    EXPECT_EQ(ack.id, id);
    EXPECT_EQ(ack.status, status);
    raw.send(encode_put_end(id, advert.window, advert.generation, "never"));
  };
  refused(window, {{0, 101}}, Status::kRefused);
  refused(window, {{0, 10}, {100, 1}}, Status::kRefused);
  refused(window, {{1ull << 63, 10}}, Status::kRefused);
  Advert other = window;
  other.generation ^= 2;
  refused(other, {{0, 10}}, Status::kStale);
  other = window;
  other.window = 0;
  refused(other, {{0, 10}}, Status::kStale);
  EXPECT_TRUE(a.holds(1, 0, a.size()));
  EXPECT_FALSE(a.next(Event::Kind::kNotice, 0, 20ms));
  // A refused put that goes on stays refused, whatever it names then.
  ++id;
  raw.send(put_frame(other, id, {{0, 3}}, "bad") + put_frame(window, id, {{0, 4}}, "late") +
           encode_put_end(id, window.window, window.generation, "never"));
  EXPECT_EQ(raw.frame().status, Status::kStale);
  raw.send(encode_notice(++id, "end"));
  EXPECT_EQ(raw.frame().id, id);
  EXPECT_TRUE(a.holds(1, 0, a.size()));
  const auto notice = a.next(Event::Kind::kNotice);
  ASSERT_TRUE(notice);
  EXPECT_EQ(notice->text, "end");
}

// What breaks the protocol costs its sender the connection, and nobody else anything.
TEST(LinkTcp, BrokenProtocolEndsThatConnectionAlone) {
  Node a = tcp_node("a");
  Node friendly = tcp_node("friendly", 1 << 20);
  const PeerId peer = friendly.connect(a->address());
  const Advert window = a.window();
  ASSERT_TRUE(a.next(Event::Kind::kPeerConnected));
  const std::string end = encode_put_end(1, window.window, window.generation, "");
  const std::vector<std::string> bad = {
      std::string(100, '\0'),
      "\xff" + end,
      end.substr(0, 10) + end,
      FrameHeader{FrameType::kPut, Status::kOk, 32, 1, kMaxPayloadBytes + 1}.encode(),
      FrameHeader{FrameType::kNotice, Status::kOk, 1 << 30, 1, 0}.encode(),
      FrameHeader{FrameType::kPut, Status::kOk, 33, 1, 1}.encode() + std::string(33, '\0'),
      put_frame(window, 1, {{0, 0}}, ""),
      encode_empty(FrameType::kGoodbye, 0) + encode_notice(1, "after goodbye"),
      encode_empty(FrameType::kGoodbye, 0) + put_frame(window, 1, {{0, 1}}, "x"),
  };
  for (const std::string& frames : bad) {
    RawPeer raw(a->address());
    ASSERT_TRUE(raw.shake_hands());
    const auto connected = a.next(Event::Kind::kPeerConnected);
    ASSERT_TRUE(connected);
    raw.send(frames);
    EXPECT_TRUE(raw.hung_up());
    const auto lost = a.next(Event::Kind::kPeerLost, connected->peer);
    ASSERT_TRUE(lost);
    if (frames.substr(2, 1) != std::string(1, static_cast<char>(FrameType::kGoodbye))) {
      EXPECT_EQ(lost->status, Status::kPeerLost) << lost->text;
    }
    EXPECT_NE(lost->text.find("raw at 127.0.0.1"), std::string::npos) << lost->text;
    ASSERT_EQ(friendly.done(friendly.put(peer, window, {{0, 0, 1000}})).status, Status::kOk);
  }
}

TEST(LinkTcp, AsksForTooMuch) {
  Node a = tcp_node("a", 8 << 20);
  const Advert window = a.window(WindowAccess::kPull);
  RawPeer raw(a->address());
  ASSERT_TRUE(raw.shake_hands());
  std::string flood;
  for (uint64_t id = 1; id <= 100; ++id) {
    flood += encode_ranges(FrameType::kPull, id, window.window, window.generation, {{0, a.size()}});
  }
  raw.send(flood);
  EXPECT_TRUE(a.next(Event::Kind::kPeerLost));
  expect_alive(a);
}

// A peer that puts and never reads the acknowledgements.
TEST(LinkTcp, AnswersNobodyReadsDoNotPileUp) {
  Node a = tcp_node("a");
  const Advert window = a.window();
  RawPeer raw(a->address());
  ASSERT_TRUE(raw.shake_hands());
  std::string flood;
  for (uint64_t id = 1; id <= 1000; ++id) {
    flood += encode_put_end(id, window.window, window.generation + 1, "");
  }
  for (int i = 0; i < 2000 && raw.send(flood); ++i) {
  }
  const auto lost = a.next(Event::Kind::kPeerLost);
  ASSERT_TRUE(lost);
  EXPECT_NE(lost->text.find("does not read"), std::string::npos) << lost->text;
}

// Notices that nobody polls wait at their sender, not here; then all come.
TEST(LinkTcp, NoticesNobodyPollsDoNotPileUp) {
  constexpr size_t kNotices = 80'000;
  Node a = tcp_node("a"), b = tcp_node("b");
  const PeerId peer = a.connect(b->address());
  for (size_t i = 0; i < kNotices; ++i) a->notify(peer, "n", in(kPatience));
  const Deadline deadline = in(kPatience);
  size_t before = 0, ended = 0;
  do {  // until it stands still
    before = ended;
    std::this_thread::sleep_for(300ms);
    for (const Event& event : a->poll()) ended += event.status == Status::kOk;
  } while ((ended == 0 || ended != before) && Clock::now() < deadline);
  EXPECT_LT(ended, kNotices);
  size_t seen = b->poll().size();
  EXPECT_LT(seen, 70'000u);
  while (seen < kNotices + 1 && Clock::now() < deadline) {  // and one that a connected
    std::this_thread::sleep_for(5ms);
    seen += b->poll().size();
    a->poll();  // it stands still too while nobody takes what has ended
  }
  EXPECT_EQ(seen, kNotices + 1);
  EXPECT_EQ(a.done(a->flush(peer, in(kPatience))).status, Status::kOk);
}

TEST(LinkTcp, HalfAFrameThenTheEnd) {
  Node a = tcp_node("a");
  a.fill(2);
  const Advert window = a.window();
  const std::string whole = put_frame(window, 1, {{0, 500}}, std::string(500, 'x')) +
                            encode_put_end(1, window.window, window.generation, "never");
  for (size_t cut = 1; cut < whole.size(); cut += 37) {
    RawPeer raw(a->address());
    ASSERT_TRUE(raw.shake_hands());
    raw.send(whole.substr(0, cut));
    raw.close();
    ASSERT_TRUE(a.next(Event::Kind::kPeerLost));
  }
  EXPECT_TRUE(a.holds(2, 500, a.size() - 500));
  EXPECT_FALSE(a.next(Event::Kind::kNotice, 0, 20ms));
}

// Frames in pieces of any size are the same frames.
TEST(LinkTcp, OneByteAtATime) {
  Node a = tcp_node("a");
  const Advert window = a.window();
  RawPeer raw(a->address());
  ASSERT_TRUE(raw.shake_hands());
  const std::string whole = put_frame(window, 1, {{0, 100}, {200, 50}}, std::string(150, 'x')) +
                            encode_put_end(1, window.window, window.generation, "n");
  for (const char byte : whole) raw.send(std::string(1, byte));
  EXPECT_EQ(raw.frame().status, Status::kOk);
  EXPECT_TRUE(a.next(Event::Kind::kNotice));
}

// An authenticated peer that says anything at all: only the window is ever written.
TEST(LinkTcp, MutatedConversationsStayInTheWindow) {
  constexpr size_t kFirst = 300'000, kLength = 5000;
  Node a = tcp_node("a");
  a.fill(3);
  const Advert window = a->advertise(a.region(), kFirst, kLength, WindowAccess::kPut);
  const Advert pull = a->advertise(a.region(), kFirst, kLength, WindowAccess::kPull);
  std::mt19937_64 random(3);
  for (int round = 0; round < 150; ++round) {
    std::string said;
    for (uint64_t id = 1; id < 20; ++id) {
      const uint64_t at = random() % kLength, length = 1 + random() % 300;
      switch (random() % 5) {
        case 0:
        case 1:
          said += put_frame(window, id, {{at, length}}, std::string(length, 'x'));
          break;
        case 2:
          said += encode_put_end(id, window.window, window.generation, "n");
          break;
        case 3:
          said += encode_ranges(FrameType::kPull, id, pull.window, pull.generation, {{at, length}});
          break;
        default:
          said += encode_ack(random() % 50, Status::kOk, "");
      }
    }
    for (uint64_t left = 1 + random() % 6; left > 0; --left) {
      said[random() % said.size()] ^= static_cast<char>(1 << random() % 8);
    }
    RawPeer raw(a->address());
    ASSERT_TRUE(raw.shake_hands());
    raw.send(said);
    raw.close();
  }
  expect_alive(a);
  EXPECT_TRUE(a.holds(3, 0, kFirst));
  EXPECT_TRUE(a.holds(3, kFirst + kLength, a.size() - kFirst - kLength));
}

// The server's side of a pull is as little trusted.
TEST(LinkTcp, PullsTakeOnlyWhatWasAskedFor) {
  for (const int how : {0, 1, 2, 3}) {
    Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(::listen(listener.get(), 1), 0);
    const std::string at = tcp::local_address(listener.get()).text();
    Node a = tcp_node("a");
    a.fill(4);
    const OpId connect = a->connect("tcp:" + at, in(kPatience));
    const Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    Handshake handshake(Handshake::Role::kServer, kToken, "liar", at);
    std::string input;
    const auto more = [&] {
      char bytes[4096];
      const ssize_t got = ::recv(socket.get(), bytes, sizeof(bytes), 0);
      ASSERT_GT(got, 0);
      input.append(bytes, static_cast<size_t>(got));
    };
    const auto say = [&](const std::string& bytes) {
      ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    };
    while (handshake.state() == Handshake::State::kGoing) {
      more();
      input.erase(0, handshake.feed(input));
      say(handshake.output());
    }
    const PeerId peer = a.done(connect).peer;
    Advert window;
    window.length = 1000;
    window.access = WindowAccess::kPull;
    const OpId pull = a.pull(peer, window, {{100, 0, 50}, {500, 50, 50}});
    while (input.size() < kFrameHeaderBytes) more();
    const uint64_t id = FrameHeader::decode(input.substr(0, kFrameHeaderBytes)).id;
    if (how == 0) say(encode_pull_data(id, 0, 101) + std::string(101, 'x'));
    if (how == 1) say(encode_pull_data(id, 1, 50) + std::string(50, 'x'));
    if (how == 2) say(encode_ack(id, Status::kOk, ""));
    if (how == 3) {
      say(encode_pull_data(id + 1, 0, 70) + std::string(70, 'x') + encode_pull_data(id, 0, 100) +
          std::string(100, 'y') + encode_ack(id, Status::kOk, ""));
    }
    EXPECT_EQ(a.done(pull).status, how == 3 ? Status::kOk : Status::kPeerLost);
    if (how == 3) {
      EXPECT_EQ(std::memcmp(a.data() + 100, std::string(50, 'y').data(), 50), 0);
      EXPECT_EQ(std::memcmp(a.data() + 500, std::string(50, 'y').data(), 50), 0);
      std::memset(a.data() + 100, 0, 50);
      std::memset(a.data() + 500, 0, 50);
      for (size_t i = 0; i < 50; ++i) {
        a.data()[100 + i] = Node::pattern(4, 100 + i);
        a.data()[500 + i] = Node::pattern(4, 500 + i);
      }
    }
    EXPECT_TRUE(a.holds(4, 0, a.size()));
  }
}

TEST(LinkTcp, OutOfDescriptorsIsOnlyAWaitAndIsToldToWhoBegins) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizers' own check of an object's type opens a pipe, for which nothing "
                  "is left here";
#endif
  Node a = tcp_node("a");
  RawPeer first(a->address());
  ASSERT_TRUE(first.shake_hands());
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old), 0);
  RawPeer waiting(a->address());  // has its own descriptor; accepting needs one more
  rlimit none = old;
  none.rlim_cur = 3;
  RawPeer late("tcp:" + a->address().substr(4));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  first.send(encode_notice(1, "n"));
  EXPECT_EQ(first.frame().type, FrameType::kAck);
  std::this_thread::sleep_for(120ms);
  const Event refused = a.done(a->connect("tcp:127.0.0.1:9", in(kPatience)));
  std::string told;
  try {
    make_tcp_endpoint({.name = "b", .token = kToken});
  } catch (const std::runtime_error& error) {
    told = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old), 0);
  EXPECT_NE(refused.text.find("ulimit -n"), std::string::npos) << refused.text;
  EXPECT_NE(told.find("ulimit -n"), std::string::npos) << told;
  EXPECT_TRUE(waiting.shake_hands());
  EXPECT_TRUE(late.shake_hands());
}

TEST(LinkTcp, IdleCostsNothing) {
  Node a = tcp_node("a"), b = tcp_node("b");
  const PeerId peer = a.connect(b->address());
  EXPECT_EQ(a.done(a.put(peer, b.window(), {{0, 0, 1000}})).status, Status::kOk);
  timespec before{}, after{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  std::this_thread::sleep_for(1s);
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double used = static_cast<double>(after.tv_sec - before.tv_sec) +
                      1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
  EXPECT_LT(used, 0.01);  // two endpoints
}

}  // namespace
}  // namespace psrl::link::testing
