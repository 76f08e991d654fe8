#ifdef PSRL_WITH_UCX

#include "link/ucx_endpoint.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <future>
#include <random>

#include "base/errors.h"

namespace psrl::link::ucx {
namespace {

using namespace std::chrono_literals;

constexpr auto kWithdrawGrace = 1s;
constexpr auto kCloseInDestructor = 200ms;
constexpr auto kCarrierGrace = 3s;
constexpr auto kReapGrace = 1s;  // for UCX to end what was cut

[[noreturn]] void fail(const UcxApi& ucx, const std::string& what, ucs_status_t status) {
  throw LinkError(what + ": " + ucx.ucs_status_string(status));
}

// "HOST:PORT", "[V6]:PORT"; false if it cannot be read as such.
bool split(const std::string& address, std::string* host, std::string* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) return false;
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (host->front() == '[' && host->back() == ']') *host = host->substr(1, host->size() - 2);
  return port->find_first_not_of("0123456789") == std::string::npos && port->size() <= 5;
}

bool resolve(const std::string& host, const std::string& port, bool listen, sockaddr_storage* where,
             socklen_t* num_where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (listen ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return false;
  std::memcpy(where, found->ai_addr, found->ai_addrlen);
  *num_where = found->ai_addrlen;
  ::freeaddrinfo(found);
  return true;
}

// The network interface that has this address, if any; and whether its carrier is there.
std::string interface_of(const sockaddr_storage& where, bool* is_running) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  std::string name;
  for (const ifaddrs* one = all; one != nullptr && name.empty(); one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != where.ss_family) continue;
    bool same = false;
    if (where.ss_family == AF_INET) {
      same = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr.s_addr ==
             reinterpret_cast<const sockaddr_in&>(where).sin_addr.s_addr;
    } else if (where.ss_family == AF_INET6) {
      same = std::memcmp(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr,
                         &reinterpret_cast<const sockaddr_in6&>(where).sin6_addr, 16) == 0;
    }
    if (!same) continue;
    name = one->ifa_name;
    *is_running = (one->ifa_flags & IFF_RUNNING) != 0;
  }
  ::freeifaddrs(all);
  return name;
}

bool has_rdma_devices() {
  struct stat info{};
  return ::stat("/dev/infiniband", &info) == 0;
}

bool puts_by_message(const UcxApi& ucx) {
  if (const char* choice = std::getenv("PSRL_UCX_PUT")) return std::string_view(choice) == "0";
  unsigned major = 0, minor = 0, release = 0;
  ucx.ucp_get_version(&major, &minor, &release);
  return major == 1 && minor < 16;
}

Fd make_eventfd() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) throw LinkError("no descriptor for a link endpoint: " + error_text(errno));
  return fd;
}

void signal(const Fd& fd) {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd.get(), &one, sizeof(one));
}

void drain(const Fd& fd) {
  uint64_t count;
  [[maybe_unused]] const auto taken = ::read(fd.get(), &count, sizeof(count));
}

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

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

// ---------------------------------------------------------------- life

UcxEndpoint::UcxEndpoint(const EndpointOptions& options)
    : ucx_(ucx_api()),
      by_message_(puts_by_message(ucx_)),
      name_(options.name),
      wake_fd_(make_eventfd()),
      events_fd_(make_eventfd()),
      next_generation_(random_number() >> 1) {
  try {
    open(options);
    listen(options);
  } catch (...) {
    release();
    throw;
  }
  running_ = true;
  // Signals are the application's: none is handled on this thread.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

UcxEndpoint::~UcxEndpoint() { close(Clock::now() + kCloseInDestructor); }

void UcxEndpoint::open(const EndpointOptions& options) {
  ucp_config_t* config = nullptr;
  auto status = ucx_.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) fail(ucx_, "the UCX_* settings cannot be used", status);
  const auto unless_set = [&](const char* name, const std::string& value) {
    if (std::getenv((std::string("UCX_") + name).c_str()) != nullptr) return;
    ucx_.ucp_config_modify(config, name, value.c_str());
  };
  // Without RDMA, data goes where the listener is: UCX would choose any interface that both have.
  sockaddr_storage where{};
  socklen_t num_where = 0;
  if (!has_rdma_devices() && resolve(options.host, "0", true, &where, &num_where)) {
    bool is_running = true;
    std::string interface = interface_of(where, &is_running);
    // UCX does not see one that was set up a moment ago, before its carrier is told.
    for (const Deadline deadline = Clock::now() + kCarrierGrace;
         !is_running && Clock::now() < deadline; interface = interface_of(where, &is_running)) {
      std::this_thread::sleep_for(10ms);
    }
    if (!interface.empty()) unless_set("NET_DEVICES", interface);
  }

  // Old versions end what they send without a copy twice when the peer dies, and abort.
  if (puts_by_message(ucx_)) unless_set("ZCOPY_THRESH", "inf");

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // memory is registered on callers' threads
  status = ucx_.ucp_init_version(1, 13, &params, config, &context_);
  ucx_.ucp_config_release(config);
  if (status != UCS_OK) fail(ucx_, "UCX " + ucx_.version + " cannot start", status);

  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucx_.ucp_worker_create(context_, &worker, &worker_);
  if (status != UCS_OK) fail(ucx_, "UCX " + ucx_.version + " cannot make a worker", status);
  status = ucx_.ucp_worker_get_efd(worker_, &worker_fd_);
  if (status != UCS_OK) fail(ucx_, "UCX's transports here cannot wake a waiting thread", status);

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = 0;
  handler.cb = &UcxEndpoint::on_active_message;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  status = ucx_.ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status != UCS_OK) fail(ucx_, "UCX takes no active messages", status);

  epoll_fd_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  for (const int fd : {worker_fd_, wake_fd_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (!epoll_fd_ || ::epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      throw LinkError("cannot wait for UCX: " + std::string(std::strerror(errno)));
    }
  }
}

void UcxEndpoint::listen(const EndpointOptions& options) {
  const std::string asked = options.host + ":" + std::to_string(options.port);
  sockaddr_storage where{};
  socklen_t num_where = 0;
  if (!resolve(options.host, std::to_string(options.port), true, &where, &num_where)) {
    throw LinkError("cannot listen on " + asked + ": no such address");
  }
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&where);
  params.sockaddr.addrlen = num_where;
  params.conn_handler.cb = &UcxEndpoint::on_connection;
  params.conn_handler.arg = this;
  auto status = ucx_.ucp_listener_create(worker_, &params, &listener_);
  if (status != UCS_OK) fail(ucx_, "cannot listen on " + asked, status);
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucx_.ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) fail(ucx_, "cannot tell the port of " + asked, status);
  const auto& bound = attributes.sockaddr;
  const uint16_t port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  const bool v6 = options.host.find(':') != std::string::npos;
  address_ = "ucx:" + (v6 ? "[" + options.host + "]" : options.host) + ":" + std::to_string(port);
}

void UcxEndpoint::release() {
  if (listener_ != nullptr) ucx_.ucp_listener_destroy(listener_);
  if (worker_ != nullptr) ucx_.ucp_worker_destroy(worker_);
  listener_ = nullptr;
  worker_ = nullptr;
  const std::lock_guard lock(memory_mutex_);
  windows_.clear();
  for (auto& [_, region] : regions_) {
    if (region->memory != nullptr) ucx_.ucp_mem_unmap(context_, region->memory);
    region->memory = nullptr;
  }
  regions_.clear();
  if (context_ != nullptr) ucx_.ucp_cleanup(context_);
  context_ = nullptr;
}

bool UcxEndpoint::close(Deadline deadline) {
  if (on_thread()) throw LinkError("an endpoint cannot be closed on its own progress thread");
  const std::lock_guard lock(close_mutex_);
  if (!thread_.joinable()) return said_goodbye_;
  {
    const std::lock_guard lock_tasks(mutex_);
    closing_ = true;
  }
  post([this, deadline] {
    leaving_ = true;
    leave_by_ = deadline;
    set_timer(deadline, 0, 0);
    for (auto& [_, peer] : peers_) leave(*peer, deadline);
  });
  thread_.join();
  release();
  return said_goodbye_;
}

std::string UcxEndpoint::describe() const {
  const std::lock_guard lock(mutex_);
  return "ucx " + ucx_.version + " (" + ucx_.file + ")" +
         (transports_.empty() ? "" : " over " + transports_) +
         (by_message_ ? ", chunks in messages" : "");
}

// ---------------------------------------------------------------- memory

UcxRegionPtr UcxEndpoint::registered(UcxRegionPtr region) {
  const std::lock_guard lock(memory_mutex_);
  if (context_ == nullptr) throw LinkError("the endpoint is closed");
  if (region->const_bytes.size() > 0) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                        UCP_MEM_MAP_PARAM_FIELD_PROT;
    params.address = const_cast<std::byte*>(region->const_bytes.data());
    params.length = region->const_bytes.size();
    params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
    if (region->writable) {
      params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_WRITE;
    }
    auto status = ucx_.ucp_mem_map(context_, &params, &region->memory);
    if (status != UCS_OK) {
      throw LinkError("cannot register " + std::to_string(region->const_bytes.size()) +
                      " bytes with UCX: " + ucx_.ucs_status_string(status) + memlock_advice());
    }
    void* key = nullptr;
    size_t num_key = 0;
    status = ucx_.ucp_rkey_pack(context_, region->memory, &key, &num_key);
    if (status != UCS_OK) {
      ucx_.ucp_mem_unmap(context_, region->memory);
      fail(ucx_, "cannot make a remote key", status);
    }
    region->key.assign(static_cast<const char*>(key), num_key);
    ucx_.ucp_rkey_buffer_release(key);
  }
  regions_[region.get()] = region;
  return region;
}

RegionPtr UcxEndpoint::add_region(std::shared_ptr<Segment> segment) {
  return registered(std::make_shared<UcxRegion>(std::move(segment)));
}

RegionPtr UcxEndpoint::add_region(Bytes memory, std::shared_ptr<const void> owner) {
  return registered(std::make_shared<UcxRegion>(memory, std::move(owner)));
}

// Null when the endpoint is closed: nothing is a region of it any more.
UcxRegionPtr UcxEndpoint::known(const RegionPtr& region) const {
  const std::lock_guard lock(memory_mutex_);
  if (context_ == nullptr) return nullptr;
  const auto found = regions_.find(region.get());
  if (found == regions_.end()) throw LinkError("not a region of this endpoint");
  return found->second;
}

void UcxEndpoint::remove_region(const RegionPtr& region) {
  const auto ours = known(region);
  if (ours == nullptr) return;
  std::set<uint64_t> windows;
  {
    const std::lock_guard lock(memory_mutex_);
    for (auto at = windows_.begin(); at != windows_.end();) {
      if (at->second.region != ours) {
        ++at;
        continue;
      }
      windows.insert(at->first);
      at = windows_.erase(at);
    }
  }
  quiesce(windows);
  const std::lock_guard lock(memory_mutex_);
  if (regions_.erase(ours.get()) == 0) return;
  if (ours->memory != nullptr) ucx_.ucp_mem_unmap(context_, ours->memory);
  ours->memory = nullptr;
}

Advert UcxEndpoint::advertise(const RegionPtr& region, uint64_t offset, uint64_t length,
                              WindowAccess access) {
  const auto ours = known(region);
  if (ours == nullptr) throw LinkError("the endpoint is closed");
  const auto* base =
      access == WindowAccess::kPut ? ours->write(offset, length) : ours->read(offset, length);
  const auto address = reinterpret_cast<uint64_t>(base);
  Advert advert{.length = length,
                .access = access,
                .memory_kind = ours->memory_kind,
                .numa_node = ours->numa_node,
                .key = {}};
  advert.key.assign(reinterpret_cast<const char*>(&address), sizeof(address));
  advert.key += ours->key;
  const std::lock_guard lock(memory_mutex_);
  advert.window = next_window_++;
  advert.generation = ++next_generation_;
  windows_[advert.window] = {advert.generation, ours, offset, length, access};
  return advert;
}

void UcxEndpoint::withdraw(const Advert& advert) {
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = windows_.find(advert.window);
    if (found == windows_.end() || found->second.generation != advert.generation) return;
    windows_.erase(found);
  }
  quiesce({advert.window});
}

// Returns when no peer touches these windows, which are not found any more.
void UcxEndpoint::quiesce(const std::set<uint64_t>& windows) {
  if (windows.empty()) return;
  call([this, &windows] {
    const auto busy = [&windows](const Peer& peer) {
      for (const auto& [_, window] : peer.grants) {
        if (windows.contains(window)) return true;
      }
      for (const auto& [transfer, _] : peer.transfers) {
        if (transfer->served && windows.contains(transfer->window)) return true;
      }
      return false;
    };
    const auto none_busy = [this, &busy] {
      for (const auto& [_, peer] : peers_) {
        if (busy(*peer)) return false;
      }
      return true;
    };
    for (auto& [_, peer] : peers_) {
      if (peer->cut || !busy(*peer)) continue;
      for (const auto& [op, window] : peer->grants) {
        if (windows.contains(window)) send(*peer, {.kind = Kind::kCut, .op = op});
      }
      for (auto& [transfer, _] : peer->transfers) {
        if (transfer->served && windows.contains(transfer->window)) {
          stop_transfer(*transfer, Status::kStale, "the window was withdrawn");
        }
      }
    }
    wait_until(none_busy, Clock::now() + kWithdrawGrace);
    for (auto& [_, peer] : peers_) {
      if (busy(*peer)) {
        cut(*peer, Status::kPeerLost, Status::kPeerLost,
            "it went on with a withdrawn window and was cut off");
      }
    }
    wait_until(none_busy, Clock::now() + kReapGrace);
  });
}

// ---------------------------------------------------------------- submitting

namespace {

uint64_t total(std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.length;
  return bytes;
}

void check_notice(std::string_view notice) {
  if (notice.size() > kMaxNoticeBytes) {
    throw LinkError("a notice of " + std::to_string(notice.size()) + " bytes; " +
                    std::to_string(kMaxNoticeBytes) + " is the limit");
  }
}

std::vector<Piece> without_empty(std::span<const Piece> pieces) {
  std::vector<Piece> kept;
  kept.reserve(pieces.size());
  for (const auto& piece : pieces) {
    if (piece.length > 0) kept.push_back(piece);
  }
  return kept;
}

}  // namespace

OpId UcxEndpoint::connect(const std::string& address, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kConnect;
  op->deadline = deadline;
  op->sink = sink;
  op->address = address;
  std::string host, port;
  if (!address.starts_with("ucx:") || !split(address.substr(4), &host, &port)) {
    throw LinkError("not an address of a ucx endpoint: " + address + " (as ucx:10.77.0.1:4712)");
  }
  if (!resolve(host, port, false, &op->where, &op->num_where)) op->num_where = 0;
  return submit(std::move(op));
}

OpId UcxEndpoint::put(PeerId peer, const Advert& into, const RegionPtr& from,
                      std::span<const Piece> pieces, std::string_view notice, Deadline deadline,
                      EventSink* sink) {
  check_notice(notice);
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kPut;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->advert = into;
  op->region = known(from);
  op->pieces = without_empty(pieces);
  op->bytes = total(pieces);
  op->notice = notice;
  for (const auto& piece : pieces) from->read(piece.local_offset, piece.length);
  return submit(std::move(op));
}

OpId UcxEndpoint::pull(PeerId peer, const Advert& from, const RegionPtr& into,
                       std::span<const Piece> pieces, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kPull;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->advert = from;
  op->region = known(into);
  op->pieces = without_empty(pieces);
  op->bytes = total(pieces);
  for (const auto& piece : pieces) into->write(piece.local_offset, piece.length);
  return submit(std::move(op));
}

OpId UcxEndpoint::notify(PeerId peer, std::string_view notice, Deadline deadline, EventSink* sink) {
  check_notice(notice);
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kNotify;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->notice = notice;
  return submit(std::move(op));
}

OpId UcxEndpoint::flush(PeerId peer, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kFlush;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  return submit(std::move(op));
}

OpId UcxEndpoint::submit(std::shared_ptr<Operation> op) {
  std::unique_lock lock(mutex_);
  const OpId id = op->id = next_op_++;
  if (running_ && !closing_) {
    tasks_.push_back([this, op = std::move(op)] { start(op); });
    lock.unlock();
    wake();
    return id;
  }
  const Event event{Event::Kind::kDone, op->peer, id, Status::kClosed, "the endpoint is closed"};
  if (running_) {
    tasks_.push_back([this, event, sink = op->sink] { emit(event, sink); });
    lock.unlock();
    wake();
  } else if (op->sink != nullptr) {
    lock.unlock();
    op->sink->on_event(event);
  } else {
    events_.push_back(event);
    signal(events_fd_);
  }
  return id;
}

void UcxEndpoint::disconnect(PeerId id, Deadline deadline) {
  post([this, id, deadline] {
    Peer* peer = find_peer(id);
    if (peer == nullptr || peer->cut) return;
    const auto ops = peer->ops;  // giving up takes them out
    for (const auto& [op_id, op] : ops) {
      if (op->ending == Status::kOk && peer->ops.contains(op_id)) {
        give_up(*peer, *op, Status::kClosed, "disconnected", Deadline::max());  // leave() has it
      }
    }
    leave(*peer, deadline);
  });
}

void UcxEndpoint::route_notices(std::string_view prefix, EventSink* sink) {
  call([this, prefix = std::string(prefix), sink] {
    if (sink == nullptr) {
      routes_.erase(prefix);
    } else {
      routes_[prefix] = sink;
    }
  });
}

std::vector<PeerCounters> UcxEndpoint::counters() const {
  return call([this] {
    std::vector<PeerCounters> all;
    for (const auto& [_, peer] : peers_) {
      if (peer->up) all.push_back(peer->counters);
    }
    return all;
  });
}

std::vector<Event> UcxEndpoint::poll() {
  const std::lock_guard lock(mutex_);
  drain(events_fd_);
  return std::exchange(events_, {});
}

// ---------------------------------------------------------------- the loop

bool UcxEndpoint::on_thread() const { return std::this_thread::get_id() == thread_id_.load(); }

void UcxEndpoint::wake() const {
  if (!on_thread()) signal(wake_fd_);
}

void UcxEndpoint::post(Task task) const {
  {
    const std::lock_guard lock(mutex_);
    if (!running_) return;
    tasks_.push_back(std::move(task));
  }
  wake();
}

void UcxEndpoint::run() {
  ::pthread_setname_np(::pthread_self(), "psrl-ucx");
  thread_id_ = std::this_thread::get_id();
  while (true) {
    run_tasks();
    turn();
    dispatch();
    if (left()) break;
    block(true);
  }
  // What came meanwhile; from then on callers do it themselves.
  while (true) {
    run_tasks();
    dispatch();
    const std::lock_guard lock(mutex_);
    if (!tasks_.empty()) continue;
    running_ = false;
    return;
  }
}

// Whether close() has nothing left to wait for.
bool UcxEndpoint::left() {
  if (!leaving_ || !tasks_done()) return false;
  if (peers_.empty() && pending_.empty()) return true;
  if (Clock::now() < leave_by_) return false;
  if (forced_) return true;
  forced_ = true;
  for (auto& [_, peer] : peers_) {
    if (!peer->cut) {
      cut(*peer, Status::kClosed, Status::kClosed, "it said no goodbye before close() ended");
    }
  }
  step();
  leave_by_ = Clock::now() + kReapGrace;
  set_timer(leave_by_, 0, 0);
  return false;
}

bool UcxEndpoint::tasks_done() const {
  const std::lock_guard lock(mutex_);
  return tasks_.empty();
}

void UcxEndpoint::run_tasks() {
  std::vector<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task();
}

void UcxEndpoint::turn() {
  constexpr int kRounds = 64;  // then look at tasks and timers again
  for (int i = 0; i < kRounds; ++i) {
    const unsigned progressed = ucx_.ucp_worker_progress(worker_);
    step();
    if (progressed == 0) break;
  }
  expire();
}

// Acts on what UCX's callbacks noted.
void UcxEndpoint::step() {
  bool more = true;
  while (more) {
    more = false;
    while (!requests_.empty()) {
      more = true;
      accept(std::exchange(requests_.front(), nullptr));
      requests_.pop_front();
    }
    while (!inbox_.empty()) {
      more = true;
      const auto [peer, bytes] = std::move(inbox_.front());
      inbox_.pop_front();
      on_message(peer, bytes);
    }

    while (!progressed_.empty()) {
      more = true;
      Transfer* transfer = progressed_.front();
      progressed_.pop_front();
      transfer->noted = false;
      settle(*transfer);
    }
    reap();
  }
}

void UcxEndpoint::block(bool with_tasks) {
  if (!pending_.empty() || !inbox_.empty() || !progressed_.empty()) return;
  if (with_tasks && !tasks_done()) return;
  // Events that came since the last progress are told by BUSY.
  if (ucx_.ucp_worker_arm(worker_) != UCS_OK) return;
  int timeout_ms = -1;
  if (!timers_.empty()) {
    const auto left = std::get<Deadline>(*timers_.begin()) - Clock::now();
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    timeout_ms = static_cast<int>(std::clamp<int64_t>(ms, 0, 3'600'000));
  }
  epoll_event events[2];
  const int num = ::epoll_wait(epoll_fd_.get(), events, 2, timeout_ms);
  for (int i = 0; i < num; ++i) {
    if (events[i].data.fd == wake_fd_.get()) drain(wake_fd_);
  }
}

// Progresses, without events and tasks, until `done` or the deadline.
void UcxEndpoint::wait_until(const std::function<bool()>& done, Deadline deadline) {
  if (done()) return;
  set_timer(deadline, 0, 0);
  while (!done() && Clock::now() < deadline) {
    turn();
    if (done()) break;
    block(false);
  }
  clear_timer(deadline, 0, 0);
}

void UcxEndpoint::emit(Event event, EventSink* sink) {
  pending_.push_back({std::move(event), sink});
}

void UcxEndpoint::dispatch() {
  while (!pending_.empty()) {
    auto [event, sink] = std::move(pending_.front());
    pending_.pop_front();
    if (event.kind == Event::Kind::kNotice) {
      size_t longest = 0;
      for (const auto& [prefix, route] : routes_) {
        if (event.text.starts_with(prefix) && (sink == nullptr || prefix.size() >= longest)) {
          longest = prefix.size();
          sink = route;
        }
      }
    }
    if (sink != nullptr) {
      sink->on_event(event);
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (events_.empty()) signal(events_fd_);
    events_.push_back(std::move(event));
  }
}

void UcxEndpoint::set_timer(Deadline deadline, PeerId peer, OpId op) {
  if (deadline != Deadline::max()) timers_.emplace(deadline, peer, op);
}

void UcxEndpoint::clear_timer(Deadline deadline, PeerId peer, OpId op) {
  timers_.erase({deadline, peer, op});
}

void UcxEndpoint::expire() {
  const auto now = Clock::now();
  while (!timers_.empty() && std::get<Deadline>(*timers_.begin()) <= now) {
    const auto [deadline, id, op] = *timers_.begin();
    timers_.erase(timers_.begin());
    Peer* peer = find_peer(id);
    if (peer == nullptr) continue;
    if (op == 0) {
      on_peer_timer(*peer);
    } else if (const auto found = peer->ops.find(op); found != peer->ops.end()) {
      on_op_timer(*peer, *found->second);
    }
    step();
  }
}

}  // namespace psrl::link::ucx

namespace psrl::link {

std::unique_ptr<Endpoint> make_ucx_endpoint(const EndpointOptions& options) {
  return std::make_unique<ucx::UcxEndpoint>(options);
}

}  // namespace psrl::link

#else  // PSRL_WITH_UCX

#include "base/errors.h"
#include "link/link.h"

namespace psrl::link {

std::unique_ptr<Endpoint> make_ucx_endpoint(const EndpointOptions&) {
  throw LinkError("psrl's core was built without UCX (WITH_UCX=OFF): use the tcp transport");
}

}  // namespace psrl::link

#endif  // PSRL_WITH_UCX
