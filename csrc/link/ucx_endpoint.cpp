#ifdef PSRL_WITH_UCX

#include "link/ucx_endpoint.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/errors.h"
#include "link/ucx_address.h"

namespace psrl::link::ucx {
namespace {

using namespace std::chrono_literals;

constexpr auto kCloseInDestructor = 200ms;
constexpr auto kCarrierGrace = 3s;

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

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

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
  eventfd_t count = 0;
  ::eventfd_read(events_fd_.get(), &count);
  return std::exchange(events_, {});
}

// ---------------------------------------------------------------- the loop

bool UcxEndpoint::on_thread() const { return std::this_thread::get_id() == thread_id_.load(); }

void UcxEndpoint::wake() const {
  if (!on_thread()) ::eventfd_write(wake_fd_.get(), 1);
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
    eventfd_t count = 0;
    if (events[i].data.fd == wake_fd_.get()) ::eventfd_read(wake_fd_.get(), &count);
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
    if (events_.empty()) ::eventfd_write(events_fd_.get(), 1);
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
