// A whole connection of the tcp transport, handshake done, against a peer that says anything at
// all: only what was advertised for putting, and what our own pull asked for, is ever written.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/errors.h"
#include "fuzz.h"
#include "link/tcp_connection.h"
#include "link/tcp_socket.h"

namespace psrl::fuzz {
namespace {

using namespace link;
using namespace link::tcp;
using namespace std::chrono_literals;

constexpr auto kToken = "a token of many bytes";
constexpr uint64_t kWindow = 512, kMemory = 4 * kWindow;  // guard, put, pull, what we pull into
constexpr std::byte kGuard{0x5A};
constexpr uint64_t kRequest = Pulls::kRequestBit | 1;  // our pull's

class House : public Owner {
 public:
  House()
      : memory_(kMemory, kGuard),
        region_(std::make_shared<Region>(Bytes(memory_), nullptr)),
        put_(windows_.add(region_, kWindow, kWindow, WindowAccess::kPut)),
        pull_(windows_.add(region_, 2 * kWindow, kWindow, WindowAccess::kPull)) {}

  const Advert& put_window() const { return put_; }
  const Advert& pull_window() const { return pull_; }

  void visit(std::string_view input) {
    num_done_ = num_lost_ = 0;
    int pair[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    Fd visitor(pair[1]);
    Connection connection(*this, 1, Fd(pair[0]), kToken, "house");
    shake_hands(connection, visitor.get());
    submit(connection);
    for (size_t at = 0; at < input.size() && !connection.closed(); at += kPiece) {
      const std::string_view piece = input.substr(at, kPiece);
      say(visitor.get(), piece);
      go_on(connection, EPOLLIN | EPOLLOUT);
      hear(visitor.get());
    }
    visitor = Fd();
    go_on(connection, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLHUP);
    require(connection.closed());
    require(num_done_ == kOperations && num_lost_ == 1);
    const auto guarded = [this](uint64_t part) {
      const auto begin = memory_.begin() + static_cast<ptrdiff_t>(part * kWindow);
      return std::all_of(begin, begin + kWindow, [](std::byte b) { return b == kGuard; });
    };
    require(guarded(0) && guarded(2));
    // Our pull was of the first half of the last part.
    require(std::all_of(memory_.end() - kWindow / 2, memory_.end(),
                        [](std::byte b) { return b == kGuard; }));
  }

  WindowTable& windows() override { return windows_; }
  void on_open(Connection&) override {}
  void on_notice(PeerId, std::string_view notice) override {
    require(notice.size() <= kMaxNoticeBytes);
  }
  void on_done(const Op&, PeerId, Status, const std::string&) override { ++num_done_; }
  void on_lost(Connection&, Status, const std::string&) override { ++num_lost_; }
  void set_timer(PeerId, Deadline) override {}
  void wake(PeerId) override {}
  bool may_read() const override { return true; }

 private:
  static constexpr size_t kPiece = 1000;  // frames come in parts
  static constexpr uint64_t kOperations = 3;

  void shake_hands(Connection& connection, int visitor) {
    Handshake handshake(Handshake::Role::kClient, kToken, "visitor",
                        local_address(connection.socket()).text());
    std::string heard;
    while (!connection.open()) {
      say(visitor, handshake.output());
      go_on(connection, EPOLLIN | EPOLLOUT);
      heard += hear(visitor);
      heard.erase(0, handshake.feed(heard));
    }
    require(handshake.state() == Handshake::State::kDone);
  }

  // What the peer may answer.
  void submit(Connection& connection) {
    const Piece piece{3 * kWindow, 0, kWindow / 2};
    for (OpId id = 1; id <= kOperations; ++id) {
      auto op = std::make_unique<Op>();
      op->kind = id == 1 ? Op::Kind::kPut : id == 2 ? Op::Kind::kPull : Op::Kind::kNotify;
      op->id = id;
      op->peer = 1;
      op->deadline = Clock::now() + 1h;
      op->region = region_;
      if (id < 3) op->pieces = {piece};
      op->notice = id == 2 ? "" : "notice";
      connection.submit(std::move(op));
    }
    go_on(connection, EPOLLOUT);
  }

  static void go_on(Connection& connection, uint32_t events) {
    connection.on_ready(events);
    while (connection.advance()) {
    }
  }
  static void say(int visitor, std::string_view what) {
    [[maybe_unused]] const auto sent = ::send(visitor, what.data(), what.size(), MSG_NOSIGNAL);
  }
  static std::string hear(int visitor) {
    char bytes[8192];
    const ssize_t got = ::recv(visitor, bytes, sizeof(bytes), MSG_DONTWAIT);
    return {bytes, got > 0 ? static_cast<size_t>(got) : 0};
  }

  std::vector<std::byte> memory_;
  WindowTable windows_;
  RegionPtr region_;
  Advert put_, pull_;
  uint64_t num_done_ = 0, num_lost_ = 0;
};

House& house() {
  static House house;
  return house;
}

}  // namespace

std::vector<std::string> seeds() {
  const Advert put = house().put_window(), pull = house().pull_window();
  const auto put_frame = [&put](uint64_t id, std::vector<Range> ranges) {
    uint64_t total = 0;
    for (const Range& range : ranges) total += range.length;
    return encode_ranges(FrameType::kPut, id, put.window, put.generation, ranges) +
           std::string(total, 'x');
  };
  const std::string puts = put_frame(1, {{0, 100}}) +
                           put_frame(1, {{100, 7}, {300, 50}, {460, 52}}) +
                           encode_put_end(1, put.window, put.generation, "n");
  const std::string pulls =
      encode_ranges(FrameType::kPull, 2, pull.window, pull.generation, {{0, 200}, {500, 12}}) +
      encode_empty(FrameType::kCancel, 2);
  const std::string answers =
      encode_ack(1, Status::kOk, "") + encode_pull_data(kRequest, 0, 100) + std::string(100, 'y') +
      encode_pull_data(kRequest, 100, kWindow / 2 - 100) + std::string(kWindow / 2 - 100, 'y') +
      encode_ack(kRequest, Status::kOk, "") + encode_ack(3, Status::kOk, "");
  const std::string end = encode_notice(3, "notice") + encode_empty(FrameType::kGoodbye, 0);
  return {puts, pulls, answers, puts + pulls + answers + end,
          put_frame(4, {{kWindow - 1, 1}}) + encode_ack(1, Status::kStale, "over") + end};
}

void feed(std::string_view input) { house().visit(input); }

}  // namespace psrl::fuzz
