// Where events go: to the sink of an operation, to the sink of a notice's prefix, else to poll().
#pragma once

#include <map>
#include <mutex>

#include "base/fd.h"
#include "link/link.h"

namespace psrl::link::tcp {

class Events {
 public:
  // A poll() that is this much behind stops the reading from peers: a notice is small, a heap of
  // them is not.
  static constexpr size_t kMaxWaiting = 1 << 16;

  Events();

  // Progress thread.
  void deliver(Event event, EventSink* sink = nullptr);
  void deliver_notice(Event event);

  // Any thread.
  std::vector<Event> take();
  bool full() const;
  int fd() const { return fd_.get(); }
  void route(std::string_view prefix, EventSink* sink);

 private:
  Fd fd_;  // eventfd: readable while waiting_ has something
  mutable std::mutex mutex_;
  std::vector<Event> waiting_;
  // Held while a routed sink is called, so that route() returns when it is not; a sink may route.
  std::recursive_mutex routes_mutex_;
  std::map<std::string, EventSink*, std::less<>> routes_;
};

}  // namespace psrl::link::tcp
