// The windows that peers may reach. What a peer names is looked up and checked here before a byte
// moves.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "link/frame.h"
#include "link/link.h"
#include "link/region.h"

namespace psrl::link::tcp {

struct Window {
  WindowAccess access;
  uint64_t generation;
  uint64_t length;
  std::byte* base;
  RegionPtr region;  // null: withdrawn. Guarded by WindowTable::touching
};
using WindowPtr = std::shared_ptr<Window>;

class WindowTable {
 public:
  // Any thread. Raise LinkError for what cannot be.
  Advert add(const RegionPtr& region, uint64_t offset, uint64_t length, WindowAccess access);
  // After it returned the memory is not touched any more.
  void withdraw(uint64_t id, uint64_t generation);
  void withdraw_all_of(const RegionPtr& region);  // null: of every region

  struct Found {
    WindowPtr window;  // null: refused
    Status status;
    const char* why;
  };
  Found find(uint64_t id, uint64_t generation, WindowAccess access,
             const std::vector<Range>& ranges) const;

  // Held by the progress thread while it reads from or writes to the memory of a window.
  std::mutex& touching() { return mutex_; }

 private:
  mutable std::mutex mutex_;
  uint64_t next_ = 1;
  std::unordered_map<uint64_t, WindowPtr> windows_;
};

}  // namespace psrl::link::tcp
