// The ucx transport: one UCP worker and one progress thread.
//
// How a put goes. A small one travels inside a message, and the receiver copies it. A larger one
// asks first: the receiver looks the window up and grants it; chunks are put straight into its
// memory, the endpoint is flushed, and then kEnd tells the notice. A pull is answered by its source
// in the same way, or, where the transport is RDMA, is a granted get. So a window whose generation
// is over is refused before a byte moves, and withdraw() knows whose puts are under way: it asks
// those peers to stop, waits until they have, and cuts the connection of one that does not within
// kWithdrawGrace.
//
// What this does not give. UCX over tcp does not check remote keys: a peer that does not speak this
// protocol can write anywhere into this process, and over RDMA anywhere into registered regions.
// There is no token here. Use it on closed fabrics only.
//
// Threads. Everything below "progress thread" belongs to it. Callers build operations, give them
// numbers and hand them over under mutex_; windows and regions have a mutex of their own, since
// advertise() and add_region() answer at once. UCX's callbacks only note what happened; step()
// acts.
#pragma once

#include <netinet/in.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "base/fd.h"
#include "link/link.h"
#include "link/region.h"
#include "link/ucx_api.h"
#include "link/ucx_wire.h"

namespace psrl::link::ucx {

// Puts and pulls up to this size travel inside a message.
inline constexpr uint64_t kInlineBytes = 64 << 10;
inline constexpr size_t kInlinePieces = 1024;
// For UCX to end what was cut.
inline constexpr auto kReapGrace = std::chrono::seconds(1);

class UcxRegion final : public Region {
 public:
  using Region::Region;
  ucp_mem_h memory = nullptr;  // null: no bytes, or unmapped
  std::string key;             // packed remote key
};
using UcxRegionPtr = std::shared_ptr<UcxRegion>;

struct Window {
  uint64_t generation = 0;
  UcxRegionPtr region;
  uint64_t offset = 0, length = 0;
  WindowAccess access = WindowAccess::kPut;
};

struct Peer;
class UcxEndpoint;

// One-sided copies between a local region and a peer's memory: of our own put or get, or of a pull
// that we answer. Freed when UCX holds nothing of it any more.
struct Transfer {
  UcxEndpoint* endpoint = nullptr;
  Peer* peer = nullptr;
  bool get = false;
  bool served = false;
  uint64_t op = 0;      // ours; served: the peer's
  uint64_t window = 0;  // served: ours that is read
  UcxRegionPtr region;
  uint64_t remote = 0;  // address that remote offsets start from
  ucp_rkey_h key = nullptr;
  std::vector<Piece> pieces;
  size_t piece = 0;  // the next to send, from `at` on
  uint64_t at = 0;
  unsigned in_flight = 0;  // chunks and flushes
  bool flushed = false;
  bool noted = false;            // in UcxEndpoint::progressed_
  Status stopped = Status::kOk;  // else: send no more, drain, end with this
  std::string text;
  uint64_t bytes = 0;  // of all pieces

  bool sent() const { return stopped != Status::kOk || piece == pieces.size(); }
};

enum class OpKind : uint8_t { kConnect, kPut, kPull, kNotify, kFlush };

struct Operation {
  OpKind kind = OpKind::kFlush;
  OpId id = 0;
  PeerId peer = 0;
  EventSink* sink = nullptr;
  Deadline deadline;
  Advert advert;
  UcxRegionPtr region;
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
  std::string notice;
  std::string address;  // connect
  sockaddr_storage where{};
  socklen_t num_where = 0;
  // Progress:
  bool asked = false;            // a grant was asked for
  bool finishing = false;        // all was put, and kEnd sent
  bool remote_writes = false;    // a pull that the peer answers by puts into our memory
  Transfer* transfer = nullptr;  // under way
  Status ending = Status::kOk;   // else: only waits for its memory to be quiet, then ends with this
  std::string text;
};

struct Peer {
  PeerId id = 0;
  ucp_ep_h ep = nullptr;
  std::string name, address;
  bool incoming = false;
  bool up = false;    // both said hello
  bool rdma = false;  // true gets
  OpId connect_op = 0;
  std::map<OpId, std::shared_ptr<Operation>> ops;
  std::set<OpId> puts;  // and notices: what a later notice waits for
  std::set<OpId> waiting;
  std::map<Transfer*, std::unique_ptr<Transfer>> transfers;
  std::deque<Transfer*> sending;
  uint64_t bytes_in_flight = 0;
  std::map<uint64_t, uint64_t> grants;  // the peer's operation -> our window, until it is done
  // Goodbyes:
  bool leaving = false;  // we want to
  bool goodbye_said = false, goodbye_heard = false;
  // The end:
  bool broken = false;  // UCX said so; step() cuts it
  bool cut = false;
  Status lost = Status::kPeerLost;      // of the event
  Status ops_lost = Status::kPeerLost;  // of the operations
  std::string why;
  bool closed = false;
  bool parted = false;  // our last word is out: step() cuts it
  bool running_waiting = false;
  Deadline timer = Deadline::max();
  PeerCounters counters;
};

class UcxEndpoint final : public Endpoint {
 public:
  explicit UcxEndpoint(const EndpointOptions& options);
  ~UcxEndpoint() override;

  std::string address() const override { return address_; }
  std::string describe() const override;
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
  int fd() const override { return events_fd_.get(); }
  std::vector<PeerCounters> counters() const override;
  void disconnect(PeerId peer, Deadline deadline) override;
  bool close(Deadline deadline) override;

 private:
  using Task = std::function<void()>;
  struct Pending {
    Event event;
    EventSink* sink;
  };

  // Any thread: its life (ucx_endpoint.cpp).
  void open(const EndpointOptions& options);
  void listen(const EndpointOptions& options);
  void release();
  bool on_thread() const;
  void wake() const;
  void post(Task task) const;
  template <typename F>
  auto call(F function) const;

  // Any thread: memory (ucx_memory.cpp), what is asked of it (ucx_submit.cpp).
  UcxRegionPtr registered(UcxRegionPtr region);
  UcxRegionPtr known(const RegionPtr& region) const;
  void quiesce(const std::set<uint64_t>& windows);
  OpId submit(std::shared_ptr<Operation> op);

  // Progress thread: the loop (ucx_endpoint.cpp).
  void run();
  bool left();
  bool tasks_done() const;
  void run_tasks();
  void turn();
  void step();
  void block(bool with_tasks);
  void wait_until(const std::function<bool()>& done, Deadline deadline);
  void dispatch();
  void emit(Event event, EventSink* sink = nullptr);
  void set_timer(Deadline deadline, PeerId peer, OpId op);
  void clear_timer(Deadline deadline, PeerId peer, OpId op);
  void expire();
  void on_op_timer(Peer& peer, Operation& op);

  // Progress thread: operations (ucx_operation.cpp).
  void start(const std::shared_ptr<Operation>& op);
  void start_put(Peer& peer, Operation& op);
  void start_pull(Peer& peer, Operation& op);
  void run_waiting(Peer& peer);
  void get_or_put(Peer& peer, Operation& op);
  void give_up(Peer& peer, Operation& op, Status status, const std::string& text, Deadline until);
  void end(Peer& peer, OpId id, Status status, const std::string& text);
  void on_verdict(Peer& peer, const Message& message, std::string_view payload);

  // Progress thread: what peers ask of us (ucx_serve.cpp).
  void on_ask(Peer& peer, const Message& message);
  void on_data(Peer& peer, const Message& message, std::string_view payload);
  void on_pull(Peer& peer, const Message& message);
  void on_end(Peer& peer, const Message& message);
  void on_chunk(Peer& peer, const Message& message, std::string_view payload);
  void on_cut(Peer& peer, const Message& message);
  void on_cancel(Peer& peer, const Message& message);
  void on_notice(Peer& peer, const std::string& notice);
  Status find_window(const Message& message, Window* window, std::string* text) const;
  void answer(Peer& peer, uint64_t op, Status status, const std::string& text);

  // Progress thread: chunks (ucx_transfer.cpp).
  Transfer* begin_transfer(Peer& peer, std::unique_ptr<Transfer> transfer, std::string_view key);
  void stop_transfer(Transfer& transfer, Status status, const std::string& text);
  void pump(Peer& peer);
  bool post_chunk(Transfer& transfer);
  void settle(Transfer& transfer);
  void end_transfer(Transfer& transfer);
  void note(Transfer* transfer);
  static void on_chunk_sent(void* request, ucs_status_t status, void* user_data);

  // Progress thread: peers (ucx_peer.cpp).
  Peer& add_peer(bool incoming);
  Peer* find_peer(PeerId id);
  void start_connect(const std::shared_ptr<Operation>& op);
  void accept(ucp_conn_request_h request);
  void on_message(PeerId id, std::string_view bytes);
  void on_message(Peer& peer, const Message& message, std::string_view payload);
  void on_hello(Peer& peer, const Message& message);
  void on_welcome(Peer& peer, const Message& message);
  void on_goodbye(Peer& peer);
  void leave(Peer& peer, Deadline by);
  void say_goodbye_if_done(Peer& peer);
  void break_peer(Peer& peer, ucs_status_t status);
  void cut(Peer& peer, Status lost, Status ops_lost, const std::string& why);
  void reap();
  void finish(Peer& peer);
  void set_peer_timer(Peer& peer, Deadline deadline);
  void on_peer_timer(Peer& peer);
  void send(Peer& peer, const Message& message, std::string_view payload = {});
  void be_up(Peer& peer, const std::string& name);
  std::string transports_of(const Peer& peer) const;
  ucp_ep_params_t peer_params();
  static void on_sent(void* request, ucs_status_t status, void* user_data);
  static void on_parted(void* request, ucs_status_t status, void* user_data);
  static void on_closed(void* request, ucs_status_t status, void* user_data);
  static void on_error(void* arg, ucp_ep_h ep, ucs_status_t status);
  static void on_connection(ucp_conn_request_h request, void* arg);
  static ucs_status_t on_active_message(void* arg, const void* header, size_t num_header,
                                        void* data, size_t size, const ucp_am_recv_param_t* param);

  const UcxApi& ucx_;
  // UCX before 1.16 ends the process when a one-sided put meets a dead peer: there, chunks travel
  // in messages and are copied by their receiver. PSRL_UCX_PUT=0 asks for the same, for tests.
  const bool by_message_;
  const std::string name_;
  std::string address_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int worker_fd_ = -1;  // the worker's
  Fd wake_fd_, epoll_fd_, events_fd_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_;

  mutable std::mutex mutex_;  // what callers hand over and take
  mutable std::vector<Task> tasks_;
  OpId next_op_ = 1;
  bool running_ = false;  // tasks will be run
  bool closing_ = false;
  std::vector<Event> events_;  // for poll()
  std::string transports_;
  std::mutex close_mutex_;
  bool said_goodbye_ = true;  // what close() returns

  mutable std::mutex memory_mutex_;
  std::map<const Region*, UcxRegionPtr> regions_;
  std::unordered_map<uint64_t, Window> windows_;
  uint64_t next_window_ = 1;
  uint64_t next_generation_ = 0;

  // Progress thread only.
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unordered_map<ucp_ep_h, PeerId> peer_of_;
  PeerId next_peer_ = 1;
  std::set<std::tuple<Deadline, PeerId, OpId>> timers_;
  std::deque<Pending> pending_;
  std::map<std::string, EventSink*, std::less<>> routes_;
  std::deque<std::pair<PeerId, std::string>> inbox_;
  std::deque<ucp_conn_request_h> requests_;
  std::deque<Transfer*> progressed_;
  std::set<PeerId> unsettled_;                    // broken, or being cut
  std::vector<std::unique_ptr<Peer>> abandoned_;  // UCX never gave all of them back

  bool leaving_ = false;  // close() was called
  bool forced_ = false;   // its deadline is over
  Deadline leave_by_;
};

// Runs `function` on the progress thread and returns what it does; inline when that has ended.
template <typename F>
auto UcxEndpoint::call(F function) const {
  if (on_thread()) return function();
  std::packaged_task<decltype(function())()> task(std::move(function));
  auto result = task.get_future();
  std::unique_lock lock(mutex_);
  if (running_) {
    tasks_.push_back([&task] { task(); });
    lock.unlock();
    wake();
  } else {
    lock.unlock();
    task();
  }
  return result.get();
}

}  // namespace psrl::link::ucx
