// The endpoint of the tcp transport: callers on any thread, everything else on one progress thread.
//
// Callers check what they can, number the operation and put it into a queue; the progress thread
// waits in epoll (edge-triggered) for sockets, the queue's eventfd and the next deadline, and gives
// each connection that has something to do a share of its time.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#include "link/tcp_connection.h"
#include "link/tcp_events.h"

namespace psrl::link::tcp {

class TcpEndpoint final : public Endpoint, private Owner {
 public:
  explicit TcpEndpoint(const EndpointOptions& options);
  ~TcpEndpoint() override;

  std::string address() const override { return address_; }
  std::string describe() const override { return "tcp"; }

  RegionPtr add_region(std::shared_ptr<Segment> segment) override;
  RegionPtr add_region(Bytes memory, std::shared_ptr<const void> owner) override;
  void remove_region(const RegionPtr& region) override;
  Advert advertise(const RegionPtr& region, uint64_t offset, uint64_t length,
                   WindowAccess access) override;
  void withdraw(const Advert& advert) override;

  OpId connect(const std::string& address, Deadline deadline, EventSink* sink) override;
  OpId put(PeerId peer, const Advert& into, const RegionPtr& from, std::span<const Piece> pieces,
           std::string_view notice, Deadline deadline, EventSink* sink) override;
  OpId pull(PeerId peer, const Advert& from, const RegionPtr& into, std::span<const Piece> pieces,
            Deadline deadline, EventSink* sink) override;
  OpId notify(PeerId peer, std::string_view notice, Deadline deadline, EventSink* sink) override;
  OpId flush(PeerId peer, Deadline deadline, EventSink* sink) override;

  void route_notices(std::string_view prefix, EventSink* sink) override;
  std::vector<Event> poll() override;
  int fd() const override { return events_.fd(); }
  std::vector<PeerCounters> counters() const override;
  void disconnect(PeerId peer, Deadline deadline) override;
  bool close(Deadline deadline) override;

 private:
  // Callers' side.
  RegionPtr keep(RegionPtr region);
  OpId submit(std::unique_ptr<Op> op);
  void wake_up() const;

  // Progress thread.
  void run();
  void wait();
  void take_submitted();
  void start(std::unique_ptr<Op> op);
  void dial(std::unique_ptr<Op> op);
  void accept_some();
  void listen_again();
  void add(std::unique_ptr<Connection> connection);
  void make_room_for_strangers();
  void expire();
  void advance_ready();
  void begin_close();
  void end_close();
  void forget(PeerId peer);
  int milliseconds_to_next_timer() const;

  // Owner.
  WindowTable& windows() override { return windows_; }
  void on_open(Connection& connection) override;
  void on_notice(PeerId peer, std::string_view notice) override;
  void on_done(const Op& op, PeerId peer, Status status, const std::string& text) override;
  void on_lost(Connection& connection, Status status, const std::string& why) override;
  void set_timer(PeerId peer, Deadline deadline) override;
  void wake(PeerId peer) override { ready_.insert(peer); }
  bool may_read() const override { return closing_ || !events_.full(); }

  const std::string name_, token_;
  Fd listener_;
  std::string address_;
  const Fd epoll_, wake_;
  WindowTable windows_;
  Events events_;

  // What callers and the progress thread share.
  mutable std::mutex mutex_;
  std::condition_variable closed_changed_;
  OpId next_op_ = 1;
  std::vector<std::unique_ptr<Op>> submitted_;
  std::vector<std::pair<PeerId, Deadline>> disconnects_;
  std::set<RegionPtr> regions_;
  std::vector<std::shared_ptr<Counters>> counters_;
  std::optional<Deadline> close_by_;
  bool closed_ = false, all_said_goodbye_ = true;
  bool stop_ = false, resume_ = false;

  // The progress thread's own.
  PeerId next_peer_;
  std::unordered_map<PeerId, std::unique_ptr<Connection>> connections_;
  std::set<PeerId> strangers_;  // accepted and not authenticated, oldest first
  std::set<PeerId> ready_;      // have something to do
  std::unordered_map<OpId, PeerId> ops_;
  std::set<std::pair<Deadline, OpId>> op_timers_;
  std::set<std::pair<Deadline, PeerId>> peer_timers_;
  std::unordered_map<PeerId, Deadline> peer_deadlines_;
  Deadline listen_again_ = Deadline::max();
  bool closing_ = false;

  std::thread thread_;
};

}  // namespace psrl::link::tcp
