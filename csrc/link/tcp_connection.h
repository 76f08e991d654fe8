// One connection to a peer: handshake, operations, goodbye. Lives on the progress thread.
//
//     connecting -> handshake -> open -> draining -> closed
//
// Whoever wants to leave says goodbye when its own operations have ended, and goes on serving the
// peer's until it says the same; then both wait for the other's end of stream, so that nothing that
// was said last is lost. Whatever goes wrong ends in lose(): all operations end, the socket closes.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>

#include "base/fd.h"
#include "link/auth.h"
#include "link/tcp_inbox.h"
#include "link/tcp_outbox.h"
#include "link/tcp_pulls.h"

namespace psrl::link::tcp {

struct Counters {
  std::string name, address;
  std::atomic<uint64_t> bytes_put = 0, bytes_received = 0, puts = 0, pulls = 0, notices = 0,
                        failures = 0;
};

class Connection;

// What a connection needs of its endpoint.
class Owner {
 public:
  virtual ~Owner() = default;
  virtual WindowTable& windows() = 0;
  virtual void on_open(Connection& connection) = 0;  // the handshake of one that was accepted
  virtual void on_notice(PeerId peer, std::string_view notice) = 0;
  virtual void on_done(const Op& op, PeerId peer, Status status, const std::string& text) = 0;
  // Of one that was open, once.
  virtual void on_lost(Connection& connection, Status status, const std::string& why) = 0;
  virtual void set_timer(PeerId peer, Deadline deadline) = 0;  // replaces an earlier one
  virtual void wake(PeerId peer) = 0;                          // advance() is wanted
  virtual bool may_read() const = 0;
};

class Connection : private Inbox::Handler {
 public:
  // Accepted.
  Connection(Owner& owner, PeerId id, Fd socket, const std::string& token, const std::string& name);
  // Dialled for `connect`, which ends with the handshake.
  Connection(Owner& owner, PeerId id, Fd socket, const std::string& token, const std::string& name,
             std::unique_ptr<Op> connect);
  ~Connection() override = default;

  PeerId id() const { return id_; }
  int socket() const { return socket_.get(); }
  bool open() const { return state_ == State::kOpen; }
  bool closed() const { return state_ == State::kClosed; }
  bool accepted() const { return accepted_; }
  bool stranger() const { return accepted_ && !was_open_; }
  bool said_goodbye() const { return goodbye_heard_ && goodbye_said_; }
  const std::shared_ptr<Counters>& counters() const { return counters_; }

  void on_ready(uint32_t epoll_events);
  // Reads and writes its share. True: there is more to do at once.
  bool advance();
  void submit(std::unique_ptr<Op> op);
  void expire(OpId id);
  void on_timer();
  // Goodbye, when our operations have ended; at the deadline without.
  void leave(Deadline deadline);
  void end_all(Status status, const std::string& why);
  void lose(Status status, const std::string& why);

 private:
  enum class State : uint8_t { kConnecting, kHandshake, kOpen, kDraining, kClosed };

  void on_frame(const FrameHeader& header, std::string_view body) override;
  void on_cut(uint64_t id) override;

  bool read_some();
  bool write_some();
  void shake_hands();
  void become_open();
  void on_put(const FrameHeader& header, std::string_view body);
  void on_put_end(const FrameHeader& header, std::string_view body);
  void on_pull(const FrameHeader& header, std::string_view body);
  void on_pull_data(const FrameHeader& header, std::string_view body);
  void on_ack(const FrameHeader& header, std::string_view body);
  void refuse_put(uint64_t id, Status status, std::string_view why);
  void finish(OpId id, Status status, const std::string& text);
  void settle();
  void drain();
  std::string who() const;

  Owner& owner_;
  const PeerId id_;
  Fd socket_;
  const bool accepted_;
  State state_;
  bool was_open_ = false;
  bool readable_ = false, writable_ = false, hung_up_ = false;
  Handshake handshake_;
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();

  Outbox outbox_;
  Inbox inbox_;
  Pulls pulls_;
  std::map<OpId, std::unique_ptr<Op>> ops_;  // ours, in order
  std::unordered_set<uint64_t> refused_;     // the peer's puts that failed and go on being sent

  bool leaving_ = false;
  Deadline leave_by_ = Deadline::max();
  bool goodbye_said_ = false, goodbye_heard_ = false;
};

}  // namespace psrl::link::tcp
