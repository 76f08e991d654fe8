#include "link/tcp_events.h"

#include <sys/eventfd.h>

#include "base/errors.h"

namespace psrl::link::tcp {

Events::Events() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_) throw_errno("eventfd of a link");
}

void Events::deliver(Event event, EventSink* sink) {
  if (sink != nullptr) return sink->on_event(event);
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(event));
  if (waiting_.size() == 1) ::eventfd_write(fd_.get(), 1);
}

void Events::deliver_notice(Event event) {
  {
    const std::lock_guard lock(routes_mutex_);
    EventSink* sink = nullptr;
    for (const auto& [prefix, routed] : routes_) {  // a longer prefix sorts after a shorter one
      if (event.text.starts_with(prefix)) sink = routed;
    }
    if (sink != nullptr) return sink->on_event(event);
  }
  deliver(std::move(event));
}

std::vector<Event> Events::take() {
  std::vector<Event> taken;
  const std::lock_guard lock(mutex_);
  if (!waiting_.empty()) {
    eventfd_t count = 0;
    ::eventfd_read(fd_.get(), &count);
    taken.swap(waiting_);
  }
  return taken;
}

bool Events::full() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size() >= kMaxWaiting;
}

void Events::route(std::string_view prefix, EventSink* sink) {
  const std::lock_guard lock(routes_mutex_);
  if (sink != nullptr) {
    routes_[std::string(prefix)] = sink;
  } else if (const auto found = routes_.find(prefix); found != routes_.end()) {
    routes_.erase(found);
  }
}

}  // namespace psrl::link::tcp
