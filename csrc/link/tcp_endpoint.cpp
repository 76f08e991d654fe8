#include "link/tcp_endpoint.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "base/errors.h"
#include "link/tcp_socket.h"

namespace psrl::link::tcp {
namespace {

constexpr size_t kMaxStrangers = 64;
constexpr size_t kMaxCounters = 4096;  // of peers that are gone or here
constexpr auto kAcceptPause = std::chrono::milliseconds(50);
constexpr auto kLastPatience = std::chrono::seconds(1);  // of the destructor
// What epoll says of these, and of connections by their numbers, which begin above.
constexpr uint64_t kListener = 0, kWake = 1, kFirstPeer = 16;

bool watch(int epoll, int fd, uint32_t events, uint64_t number) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

void check_pieces(const Region& region, std::span<const Piece> pieces, bool write) {
  for (const Piece& piece : pieces) {
    if (write) {
      region.write(piece.local_offset, piece.length);
    } else {
      region.read(piece.local_offset, piece.length);
    }
  }
}

// What the advert alone tells is told at once.
void check_advert(Op& op, const Advert& advert, WindowAccess access) {
  if (advert.access != access) {
    op.early = Status::kRefused;
    op.why = "the window does not allow that";
  }
  for (const Piece& piece : op.pieces) {
    if (piece.remote_offset > advert.length || piece.length > advert.length - piece.remote_offset) {
      op.early = Status::kRefused;
      op.why = "a range outside of the window";
    }
  }
}

void check_notice(std::string_view notice) {
  if (notice.size() > kMaxNoticeBytes) {
    throw LinkError("a notice of " + std::to_string(notice.size()) + " bytes, at most " +
                    std::to_string(kMaxNoticeBytes) + " are possible");
  }
}

}  // namespace

TcpEndpoint::TcpEndpoint(const EndpointOptions& options)
    : name_(options.name.substr(0, kMaxNameBytes)),
      token_(options.token),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      next_peer_(kFirstPeer) {
  if (!epoll_ || !wake_) throw_errno("descriptors of a link");
  if (token_.size() < kMinTokenBytes) {
    throw LinkError("a link's token has at least " + std::to_string(kMinTokenBytes) + " bytes");
  }
  listener_ = listen_on(options.host, options.port);
  address_ = "tcp:" + local_address(listener_.get()).text();
  if (!watch(epoll_.get(), listener_.get(), EPOLLIN, kListener) ||
      !watch(epoll_.get(), wake_.get(), EPOLLIN, kWake)) {
    throw_errno("epoll_ctl of a link");
  }
  thread_ = std::thread([this] { run(); });
}

TcpEndpoint::~TcpEndpoint() {
  close(Clock::now() + kLastPatience);
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_up();
  thread_.join();
}

// ---- callers' side

void TcpEndpoint::wake_up() const { ::eventfd_write(wake_.get(), 1); }

RegionPtr TcpEndpoint::keep(RegionPtr region) {
  const std::lock_guard lock(mutex_);
  if (!close_by_) regions_.insert(region);
  return region;
}

RegionPtr TcpEndpoint::add_region(std::shared_ptr<Segment> segment) {
  return keep(std::make_shared<Region>(segment));
}

RegionPtr TcpEndpoint::add_region(Bytes memory, std::shared_ptr<const void> owner) {
  return keep(std::make_shared<Region>(memory, std::move(owner)));
}

void TcpEndpoint::remove_region(const RegionPtr& region) {
  if (region == nullptr) return;
  windows_.withdraw_all_of(region);
  const std::lock_guard lock(mutex_);
  regions_.erase(region);
}

Advert TcpEndpoint::advertise(const RegionPtr& region, uint64_t offset, uint64_t length,
                              WindowAccess access) {
  return windows_.add(region, offset, length, access);
}

void TcpEndpoint::withdraw(const Advert& advert) {
  windows_.withdraw(advert.window, advert.generation);
}

OpId TcpEndpoint::submit(std::unique_ptr<Op> op) {
  bool first = false;
  OpId id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = op->id = next_op_++;
    if (close_by_ && op->early == Status::kOk) {
      op->early = Status::kClosed;
      op->why = "this endpoint is closed";
    }
    first = submitted_.empty();
    submitted_.push_back(std::move(op));
  }
  if (first) wake_up();
  return id;
}

OpId TcpEndpoint::connect(const std::string& address, Deadline deadline, EventSink* sink) {
  parse_address(address);
  auto op = std::make_unique<Op>();
  op->kind = Op::Kind::kConnect;
  op->deadline = deadline;
  op->sink = sink;
  op->address = address;
  return submit(std::move(op));
}

OpId TcpEndpoint::put(PeerId peer, const Advert& into, const RegionPtr& from,
                      std::span<const Piece> pieces, std::string_view notice, Deadline deadline,
                      EventSink* sink) {
  if (from == nullptr) throw LinkError("no region to put from");
  check_pieces(*from, pieces, false);
  check_notice(notice);
  auto op = std::make_unique<Op>();
  op->kind = Op::Kind::kPut;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->window = into.window;
  op->generation = into.generation;
  op->region = from;
  op->pieces.assign(pieces.begin(), pieces.end());
  std::erase_if(op->pieces, [](const Piece& piece) { return piece.length == 0; });
  op->notice = notice;
  check_advert(*op, into, WindowAccess::kPut);
  return submit(std::move(op));
}

OpId TcpEndpoint::pull(PeerId peer, const Advert& from, const RegionPtr& into,
                       std::span<const Piece> pieces, Deadline deadline, EventSink* sink) {
  if (into == nullptr) throw LinkError("no region to pull into");
  check_pieces(*into, pieces, true);
  auto op = std::make_unique<Op>();
  op->kind = Op::Kind::kPull;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->window = from.window;
  op->generation = from.generation;
  op->region = into;
  op->pieces.assign(pieces.begin(), pieces.end());
  std::erase_if(op->pieces, [](const Piece& piece) { return piece.length == 0; });
  check_advert(*op, from, WindowAccess::kPull);
  return submit(std::move(op));
}

OpId TcpEndpoint::notify(PeerId peer, std::string_view notice, Deadline deadline, EventSink* sink) {
  check_notice(notice);
  auto op = std::make_unique<Op>();
  op->kind = Op::Kind::kNotify;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->notice = notice;
  return submit(std::move(op));
}

OpId TcpEndpoint::flush(PeerId peer, Deadline deadline, EventSink* sink) {
  auto op = std::make_unique<Op>();
  op->kind = Op::Kind::kFlush;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  return submit(std::move(op));
}

void TcpEndpoint::route_notices(std::string_view prefix, EventSink* sink) {
  events_.route(prefix, sink);
}

std::vector<Event> TcpEndpoint::poll() {
  std::vector<Event> taken = events_.take();
  if (taken.size() >= Events::kMaxWaiting) {  // connections wait for this
    {
      const std::lock_guard lock(mutex_);
      resume_ = true;
    }
    wake_up();
  }
  return taken;
}

std::vector<PeerCounters> TcpEndpoint::counters() const {
  const std::lock_guard lock(mutex_);
  std::vector<PeerCounters> result;
  result.reserve(counters_.size());
  for (const auto& c : counters_) {
    result.push_back({c->name, c->address, c->bytes_put, c->bytes_received, c->puts, c->pulls,
                      c->notices, c->failures});
  }
  return result;
}

void TcpEndpoint::disconnect(PeerId peer, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    disconnects_.emplace_back(peer, deadline);
  }
  wake_up();
}

bool TcpEndpoint::close(Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (!close_by_) {
    close_by_ = deadline;
    wake_up();
  }
  closed_changed_.wait(lock, [this] { return closed_; });
  return all_said_goodbye_;
}

// ---- the progress thread

void TcpEndpoint::run() {
  ::pthread_setname_np(::pthread_self(), "psrl-link");
  sigset_t all;  // signals are for the threads of who embeds us
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (true) {
    wait();
    take_submitted();
    expire();
    advance_ready();
    const std::lock_guard lock(mutex_);
    if (stop_) return;
  }
}

int TcpEndpoint::milliseconds_to_next_timer() const {
  if (!ready_.empty()) return 0;
  Deadline next = listen_again_;
  if (!op_timers_.empty()) next = std::min(next, op_timers_.begin()->first);
  if (!peer_timers_.empty()) next = std::min(next, peer_timers_.begin()->first);
  if (next == Deadline::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

void TcpEndpoint::wait() {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, milliseconds_to_next_timer());
  for (int i = 0; i < count; ++i) {
    switch (const uint64_t number = events[i].data.u64; number) {
      case kListener:
        accept_some();
        break;
      case kWake: {
        eventfd_t value = 0;
        ::eventfd_read(wake_.get(), &value);
        break;
      }
      default:
        if (const auto found = connections_.find(number); found != connections_.end()) {
          found->second->on_ready(events[i].events);
        }
    }
  }
}

void TcpEndpoint::take_submitted() {
  std::vector<std::unique_ptr<Op>> submitted;
  std::vector<std::pair<PeerId, Deadline>> disconnects;
  bool resume = false, close = false;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    disconnects.swap(disconnects_);
    std::swap(resume, resume_);
    close = close_by_.has_value() && !closing_;
  }
  for (auto& op : submitted) start(std::move(op));
  for (const auto& [peer, deadline] : disconnects) {
    const auto found = connections_.find(peer);
    if (found == connections_.end()) continue;
    found->second->leave(deadline);
    found->second->end_all(Status::kClosed, "disconnected");
  }
  if (resume) {
    for (const auto& [peer, connection] : connections_) ready_.insert(peer);
  }
  if (close) begin_close();
}

void TcpEndpoint::start(std::unique_ptr<Op> op) {
  if (op->early == Status::kOk && op->deadline <= Clock::now()) {
    op->early = Status::kTimeout;
    op->why = "its deadline was over before it began";
  }
  if (op->early != Status::kOk) return on_done(*op, op->peer, op->early, op->why);
  if (op->kind == Op::Kind::kConnect) return dial(std::move(op));
  const auto found = connections_.find(op->peer);
  if (found == connections_.end() || found->second->stranger()) {
    return on_done(*op, op->peer, Status::kPeerLost, "no such peer, or it is gone");
  }
  ops_.emplace(op->id, op->peer);
  if (op->deadline != Deadline::max()) op_timers_.emplace(op->deadline, op->id);
  found->second->submit(std::move(op));
}

void TcpEndpoint::dial(std::unique_ptr<Op> op) {
  Fd socket;
  try {
    socket = begin_connect(parse_address(op->address));
  } catch (const LinkError& error) {
    return on_done(*op, 0, Status::kPeerLost, op->address.substr(4) + ": " + error.what());
  }
  const PeerId peer = next_peer_++;
  ops_.emplace(op->id, peer);
  if (op->deadline != Deadline::max()) op_timers_.emplace(op->deadline, op->id);
  Owner& owner = *this;
  add(std::make_unique<Connection>(owner, peer, std::move(socket), token_, name_, std::move(op)));
}

void TcpEndpoint::add(std::unique_ptr<Connection> connection) {
  const PeerId peer = connection->id();
  if (!watch(epoll_.get(), connection->socket(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, peer)) {
    connection->lose(Status::kPeerLost, error_text(errno));
    return forget(peer);
  }
  connections_.emplace(peer, std::move(connection));
}

void TcpEndpoint::accept_some() {
  for (int i = 0; i < 64; ++i) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      // Out of descriptors: let some go before looking again; who connects waits in line.
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      listen_again_ = Clock::now() + kAcceptPause;
      return;
    }
    tune(socket.get());
    make_room_for_strangers();
    const PeerId peer = next_peer_++;
    strangers_.insert(peer);
    Owner& owner = *this;
    add(std::make_unique<Connection>(owner, peer, std::move(socket), token_, name_));
  }
}

// Who knows the token is no stranger for more than a moment; so the oldest one goes.
void TcpEndpoint::make_room_for_strangers() {
  if (strangers_.size() < kMaxStrangers) return;
  const PeerId oldest = *strangers_.begin();
  connections_.at(oldest)->lose(Status::kRefused, "too many strangers");
  forget(oldest);
}

void TcpEndpoint::listen_again() {
  listen_again_ = Deadline::max();
  if (!closing_ && !watch(epoll_.get(), listener_.get(), EPOLLIN, kListener)) {
    listen_again_ = Clock::now() + kAcceptPause;
  }
}

void TcpEndpoint::expire() {
  const auto now = Clock::now();
  if (listen_again_ <= now) listen_again();
  while (!op_timers_.empty() && op_timers_.begin()->first <= now) {
    const OpId id = op_timers_.begin()->second;
    op_timers_.erase(op_timers_.begin());
    const auto op = ops_.find(id);
    if (op == ops_.end()) continue;
    const auto found = connections_.find(op->second);
    if (found != connections_.end()) found->second->expire(id);
  }
  while (!peer_timers_.empty() && peer_timers_.begin()->first <= now) {
    const PeerId peer = peer_timers_.begin()->second;
    set_timer(peer, Deadline::max());
    const auto found = connections_.find(peer);
    if (found != connections_.end()) found->second->on_timer();
  }
}

void TcpEndpoint::advance_ready() {
  std::set<PeerId> ready;
  ready.swap(ready_);
  for (const PeerId peer : ready) {
    const auto found = connections_.find(peer);
    if (found == connections_.end()) continue;
    if (found->second->advance()) ready_.insert(peer);
    if (found->second->closed()) forget(peer);
  }
  if (closing_ && connections_.empty()) end_close();
}

void TcpEndpoint::forget(PeerId peer) {
  set_timer(peer, Deadline::max());
  strangers_.erase(peer);
  ready_.erase(peer);
  connections_.erase(peer);
}

void TcpEndpoint::begin_close() {
  closing_ = true;
  listener_ = Fd();
  Deadline deadline;
  {
    const std::lock_guard lock(mutex_);
    deadline = *close_by_;
  }
  for (const auto& [peer, connection] : connections_) {
    connection->leave(deadline);
    ready_.insert(peer);
  }
}

void TcpEndpoint::end_close() {
  windows_.withdraw_all_of(nullptr);
  std::set<RegionPtr> regions;  // end after the lock
  const std::lock_guard lock(mutex_);
  regions.swap(regions_);
  closed_ = true;
  closed_changed_.notify_all();
}

// ---- what connections say

void TcpEndpoint::on_open(Connection& connection) {
  strangers_.erase(connection.id());
  {
    const std::lock_guard lock(mutex_);
    if (counters_.size() >= kMaxCounters) counters_.erase(counters_.begin());
    counters_.push_back(connection.counters());
  }
  if (connection.accepted()) {
    events_.deliver({Event::Kind::kPeerConnected, connection.id(), 0, Status::kOk,
                     connection.counters()->name});
  }
}

void TcpEndpoint::on_notice(PeerId peer, std::string_view notice) {
  events_.deliver_notice({Event::Kind::kNotice, peer, 0, Status::kOk, std::string(notice)});
}

void TcpEndpoint::on_done(const Op& op, PeerId peer, Status status, const std::string& text) {
  ops_.erase(op.id);
  op_timers_.erase({op.deadline, op.id});
  events_.deliver({Event::Kind::kDone, peer, op.id, status, text}, op.sink);
}

void TcpEndpoint::on_lost(Connection& connection, Status status, const std::string& why) {
  if (closing_ && !connection.said_goodbye()) {
    const std::lock_guard lock(mutex_);
    all_said_goodbye_ = false;
  }
  events_.deliver({Event::Kind::kPeerLost, connection.id(), 0, status, why});
}

void TcpEndpoint::set_timer(PeerId peer, Deadline deadline) {
  if (const auto found = peer_deadlines_.find(peer); found != peer_deadlines_.end()) {
    peer_timers_.erase({found->second, peer});
    peer_deadlines_.erase(found);
  }
  if (deadline == Deadline::max()) return;
  peer_deadlines_.emplace(peer, deadline);
  peer_timers_.emplace(deadline, peer);
}

}  // namespace psrl::link::tcp

namespace psrl::link {

std::unique_ptr<Endpoint> make_tcp_endpoint(const EndpointOptions& options) {
  return std::make_unique<tcp::TcpEndpoint>(options);
}

}  // namespace psrl::link
