#include "link/tcp_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/errors.h"
#include "link/tcp_socket.h"

namespace psrl::link::tcp {
namespace {

constexpr auto kHandshakePatience = std::chrono::seconds(5);
constexpr auto kDrainPatience = std::chrono::seconds(1);
constexpr uint64_t kShareBytes = 4 << 20;     // of reading, then others have a turn
constexpr size_t kMaxAnswersBytes = 1 << 20;  // that a peer may leave unread
constexpr size_t kMaxRefused = 4 * kMaxInFlight;

// The dialled address as both sides see it: a scope is a name of this host alone.
std::string without_scope(std::string address) {
  if (const size_t scope = address.find('%'); scope != std::string::npos) {
    address.erase(scope, address.find(']') - scope);
  }
  return address;
}

}  // namespace

Connection::Connection(Owner& owner, PeerId id, Fd socket, const std::string& token,
                       const std::string& name)
    : owner_(owner),
      id_(id),
      socket_(std::move(socket)),
      accepted_(true),
      state_(State::kHandshake),
      handshake_(Handshake::Role::kServer, token, name,
                 without_scope(local_address(socket_.get()).text())),
      outbox_(owner.windows()),
      inbox_(owner.windows()),
      pulls_(outbox_) {
  counters_->address = peer_address(socket_.get()).text();
  owner_.set_timer(id_, Clock::now() + kHandshakePatience);
}

Connection::Connection(Owner& owner, PeerId id, Fd socket, const std::string& token,
                       const std::string& name, std::unique_ptr<Op> connect)
    : owner_(owner),
      id_(id),
      socket_(std::move(socket)),
      accepted_(false),
      state_(State::kConnecting),
      handshake_(Handshake::Role::kClient, token, name,
                 without_scope(parse_address(connect->address).text())),
      outbox_(owner.windows()),
      inbox_(owner.windows()),
      pulls_(outbox_) {
  counters_->address = connect->address.substr(4);
  ops_.emplace(connect->id, std::move(connect));
}

std::string Connection::who() const {
  return counters_->name.empty() ? counters_->address
                                 : counters_->name + " at " + counters_->address;
}

// ---- what the socket says

void Connection::on_ready(uint32_t events) {
  if (events & EPOLLIN) readable_ = true;
  if (events & EPOLLOUT) writable_ = true;
  if (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) readable_ = hung_up_ = true;
  owner_.wake(id_);
}

bool Connection::advance() {
  try {
    if (state_ == State::kConnecting) {
      if (!writable_ && !hung_up_) return false;
      int error = 0;
      socklen_t length = sizeof(error);
      ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) throw LinkError(error_text(error));
      tune(socket_.get());
      state_ = State::kHandshake;
      outbox_.control(handshake_.output());
    }
    const bool more_to_read = read_some();
    const bool more_to_write = write_some();
    settle();
    return state_ != State::kClosed && (more_to_read || more_to_write);
  } catch (const LinkError& error) {
    lose(Status::kPeerLost, error.what());
    return false;
  }
}

bool Connection::read_some() {
  const uint64_t until = inbox_.payload_bytes() + kShareBytes;
  for (int turns = 0; readable_ && state_ != State::kClosed; ++turns) {
    if (turns == 64 || inbox_.payload_bytes() >= until) return true;
    if (state_ == State::kOpen && !owner_.may_read()) return false;
    const Inbox::Got got =
        state_ == State::kOpen ? inbox_.read(socket_.get(), *this) : inbox_.read_raw(socket_.get());
    if (got == Inbox::Got::kEnd) {
      if (state_ == State::kDraining) {
        state_ = State::kClosed;
        return false;
      }
      throw LinkError(inbox_.complete() ? "the peer hung up" : "the peer hung up within a frame");
    }
    // All was read; but the end of the stream comes without another event.
    if (got == Inbox::Got::kDry && !hung_up_) readable_ = false;
    if (state_ == State::kHandshake) {
      shake_hands();
    } else if (state_ == State::kOpen) {
      inbox_.parse(*this);
    } else if (state_ == State::kDraining) {
      inbox_.consume(inbox_.raw().size());
    }
    if (outbox_.control_bytes() > kMaxAnswersBytes) {
      throw LinkError("the peer does not read what it is told");
    }
  }
  return false;
}

bool Connection::write_some() {
  if (!writable_ || state_ == State::kClosed || outbox_.idle()) return false;
  const uint64_t before = outbox_.data_bytes();
  const Outbox::Written written = outbox_.write(socket_.get());
  counters_->bytes_put += outbox_.data_bytes() - before;
  if (written == Outbox::Written::kBlocked) writable_ = false;
  return written == Outbox::Written::kMore;
}

void Connection::on_timer() {
  switch (state_) {
    case State::kConnecting:
    case State::kHandshake:
      return lose(Status::kTimeout, "no handshake in time");
    case State::kOpen:  // a goodbye that was not answered
      return lose(Status::kClosed, "no goodbye in time");
    case State::kDraining:
      state_ = State::kClosed;
      return owner_.wake(id_);
    case State::kClosed:
      return;
  }
}

// ---- handshake

void Connection::shake_hands() {
  inbox_.consume(handshake_.feed(inbox_.raw()));
  outbox_.control(handshake_.output());
  switch (handshake_.state()) {
    case Handshake::State::kGoing:
      return;
    case Handshake::State::kDone:
      become_open();
      return inbox_.parse(*this);
    case Handshake::State::kRefused:
      if (accepted_) return drain();  // it should still read why
      return lose(Status::kRefused, handshake_.reason());
  }
}

void Connection::become_open() {
  state_ = State::kOpen;
  was_open_ = true;
  counters_->name = handshake_.peer_name();
  owner_.set_timer(id_, Deadline::max());
  owner_.on_open(*this);
  if (!accepted_ && !ops_.empty()) {
    finish(ops_.begin()->first, Status::kOk, handshake_.peer_name());
  }
}

// ---- operations of ours

void Connection::submit(std::unique_ptr<Op> op) {
  if (state_ != State::kOpen || goodbye_heard_ || leaving_) {
    return owner_.on_done(*op, id_, goodbye_heard_ ? Status::kPeerLost : Status::kClosed,
                          who() + (goodbye_heard_ ? " said goodbye" : " was disconnected"));
  }
  const Op& submitted = *op;
  ops_.emplace(submitted.id, std::move(op));
  switch (submitted.kind) {
    case Op::Kind::kPut:
    case Op::Kind::kNotify:
      outbox_.submit(submitted);
      break;
    case Op::Kind::kPull:
      pulls_.submit(submitted);
      break;
    case Op::Kind::kFlush:
      if (ops_.size() == 1) finish(submitted.id, Status::kOk, {});
      break;
    case Op::Kind::kConnect:
      break;
  }
  owner_.wake(id_);
}

void Connection::expire(OpId id) {
  if (!ops_.contains(id)) return;
  if (state_ != State::kOpen) return lose(Status::kTimeout, "no handshake in time");
  finish(id, Status::kTimeout, "not done by its deadline, to or from " + who());
}

void Connection::finish(OpId id, Status status, const std::string& text) {
  auto node = ops_.extract(id);
  if (node.empty()) return;
  const Op& op = *node.mapped();
  outbox_.ended(id);
  for (const uint64_t request : pulls_.ended(id)) inbox_.forget(FrameType::kPullData, request);
  if (status != Status::kOk) {
    counters_->failures += 1;
  } else if (op.kind == Op::Kind::kPut) {
    counters_->puts += 1;
  } else if (op.kind == Op::Kind::kPull) {
    counters_->pulls += 1;
  }
  owner_.on_done(op, id_, status, text);
  while (!ops_.empty() && ops_.begin()->second->kind == Op::Kind::kFlush) {
    const auto flush = ops_.extract(ops_.begin());
    owner_.on_done(*flush.mapped(), id_, Status::kOk, {});
  }
  owner_.wake(id_);
}

void Connection::end_all(Status status, const std::string& why) {
  while (!ops_.empty()) {
    // The last first: a flush must not end well because what it waits for was given up.
    finish(std::prev(ops_.end())->first, status, why);
  }
}

// ---- the end

void Connection::leave(Deadline deadline) {
  if (state_ == State::kDraining || state_ == State::kClosed) return;
  if (state_ != State::kOpen) return lose(Status::kClosed, "closed before the handshake was done");
  leaving_ = true;
  leave_by_ = deadline;
  owner_.set_timer(id_, deadline);
  owner_.wake(id_);
}

// Says goodbye when it is time, and drains when both have.
void Connection::settle() {
  if (state_ == State::kOpen) {
    if ((leaving_ || goodbye_heard_) && !goodbye_said_ && ops_.empty()) {
      goodbye_said_ = true;
      outbox_.control(encode_empty(FrameType::kGoodbye, 0));
      owner_.wake(id_);
    }
    if (goodbye_said_ && goodbye_heard_ && outbox_.idle()) drain();
  } else if (state_ == State::kDraining && outbox_.idle()) {
    ::shutdown(socket_.get(), SHUT_WR);
  }
}

void Connection::drain() {
  const bool was_open = state_ == State::kOpen;
  state_ = State::kDraining;
  owner_.set_timer(id_, std::min<Deadline>(leave_by_, Clock::now() + kDrainPatience));
  owner_.wake(id_);
  if (was_open) owner_.on_lost(*this, Status::kClosed, who() + " said goodbye");
}

void Connection::lose(Status status, const std::string& why) {
  if (state_ == State::kClosed) return;
  const bool was_up = state_ == State::kOpen;
  const std::string text = who() + ": " + why;
  if (was_up && leaving_) status = Status::kClosed;
  end_all(status, text);
  state_ = State::kClosed;
  owner_.wake(id_);
  if (was_up) owner_.on_lost(*this, status, text);
}

// ---- what the peer sends

void Connection::on_frame(const FrameHeader& header, std::string_view body) {
  const bool begins = header.type == FrameType::kPut || header.type == FrameType::kPutEnd ||
                      header.type == FrameType::kPull || header.type == FrameType::kNotice;
  if (goodbye_heard_ && begins) throw LinkError("the peer went on after its goodbye");
  switch (header.type) {
    case FrameType::kPut:
      return on_put(header, body);
    case FrameType::kPutEnd:
      return on_put_end(header, body);
    case FrameType::kPull:
      return on_pull(header, body);
    case FrameType::kPullData:
      return on_pull_data(header, body);
    case FrameType::kAck:
      return on_ack(header, body);
    case FrameType::kNotice:
      counters_->notices += 1;
      outbox_.control(encode_ack(header.id, Status::kOk, {}));
      return owner_.on_notice(id_, body);
    case FrameType::kCancel:
      refused_.erase(header.id);
      return outbox_.stop_serving(header.id);
    case FrameType::kGoodbye:
      goodbye_heard_ = true;
      return;
  }
}

void Connection::on_put(const FrameHeader& header, std::string_view body) {
  const WindowRanges put = WindowRanges::decode(header, body);
  if (refused_.contains(header.id)) return;
  const auto found =
      owner_.windows().find(put.window, put.generation, WindowAccess::kPut, put.ranges);
  if (found.window == nullptr) return refuse_put(header.id, found.status, found.why);
  std::vector<iovec> parts;
  parts.reserve(put.ranges.size());
  for (const Range& range : put.ranges) {
    parts.push_back({found.window->base + range.offset, range.length});
  }
  counters_->bytes_received += put.total;
  inbox_.receive_into(std::move(parts), found.window);
}

void Connection::on_put_end(const FrameHeader& header, std::string_view body) {
  const PutEnd end = PutEnd::decode(header, body);
  if (refused_.erase(header.id) != 0) return;
  const auto found = owner_.windows().find(end.window, end.generation, WindowAccess::kPut, {});
  outbox_.control(encode_ack(header.id, found.status, found.why));
  if (found.window == nullptr || end.notice.empty()) return;
  counters_->notices += 1;
  owner_.on_notice(id_, end.notice);
}

void Connection::on_cut(uint64_t id) { refuse_put(id, Status::kStale, "the window was withdrawn"); }

// The rest of it is forgotten as it comes.
void Connection::refuse_put(uint64_t id, Status status, std::string_view why) {
  outbox_.control(encode_ack(id, status, why));
  refused_.insert(id);
  if (refused_.size() > kMaxRefused)
    throw LinkError("the peer goes on with puts that were refused");
}

void Connection::on_pull(const FrameHeader& header, std::string_view body) {
  WindowRanges pull = WindowRanges::decode(header, body);
  if (outbox_.num_served() >= kMaxServed || outbox_.serves(header.id)) {
    throw LinkError("the peer asks for too much at a time");
  }
  const auto found =
      owner_.windows().find(pull.window, pull.generation, WindowAccess::kPull, pull.ranges);
  if (found.window == nullptr || pull.total == 0) {
    return outbox_.control(encode_ack(header.id, found.status, found.why));
  }
  outbox_.serve(header.id, found.window, std::move(pull.ranges));
}

void Connection::on_pull_data(const FrameHeader& header, std::string_view body) {
  auto parts = pulls_.receive(header.id, decode_position(header, body), header.payload);
  if (parts.empty()) return;
  counters_->bytes_received += header.payload;
  inbox_.receive_into(std::move(parts), nullptr);
}

void Connection::on_ack(const FrameHeader& header, std::string_view body) {
  if (header.id & Pulls::kRequestBit) {
    const auto ended = pulls_.acknowledged(header.id, header.status, body);
    if (ended) finish(ended->id, ended->status, ended->why);
    return;
  }
  const auto found = ops_.find(header.id);
  if (found == ops_.end()) return;  // it has ended here already
  if (found->second->kind != Op::Kind::kPut && found->second->kind != Op::Kind::kNotify) {
    throw LinkError("the peer acknowledged what it was not sent");
  }
  if (header.status == Status::kOk && outbox_.unsent(header.id)) {
    throw LinkError("the peer acknowledged what it was not sent");
  }
  finish(header.id, header.status, std::string(body));
}

}  // namespace psrl::link::tcp
