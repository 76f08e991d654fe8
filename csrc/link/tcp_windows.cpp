#include "link/tcp_windows.h"

#include <sys/random.h>

#include "base/errors.h"

namespace psrl::link::tcp {
namespace {

// Random, so that an endpoint that came up again at the same address refuses what its forerunner
// advertised. Below 2^63, so that it is a plain integer in every message format.
uint64_t fresh_generation() {
  uint64_t value = 0;
  if (::getrandom(&value, sizeof(value), 0) != sizeof(value)) throw_errno("getrandom");
  return value >> 1 | 1;
}

}  // namespace

Advert WindowTable::add(const RegionPtr& region, uint64_t offset, uint64_t length,
                        WindowAccess access) {
  if (region == nullptr) throw LinkError("no region to advertise");
  auto window = std::make_shared<Window>();
  window->access = access;
  window->length = length;
  window->base = access == WindowAccess::kPut
                     ? region->write(offset, length)
                     : const_cast<std::byte*>(region->read(offset, length));
  window->generation = fresh_generation();
  window->region = region;
  Advert advert;
  advert.generation = window->generation;
  advert.length = length;
  advert.access = access;
  advert.memory_kind = region->memory_kind;
  advert.numa_node = region->numa_node;
  const std::lock_guard lock(mutex_);
  advert.window = next_++;
  windows_.emplace(advert.window, std::move(window));
  return advert;
}

void WindowTable::withdraw(uint64_t id, uint64_t generation) {
  RegionPtr region;  // ends, and with it perhaps its memory, after the lock
  const std::lock_guard lock(mutex_);
  const auto found = windows_.find(id);
  if (found == windows_.end() || found->second->generation != generation) return;
  region = std::move(found->second->region);
  windows_.erase(found);
}

void WindowTable::withdraw_all_of(const RegionPtr& region) {
  std::vector<RegionPtr> regions;
  const std::lock_guard lock(mutex_);
  std::erase_if(windows_, [&](auto& entry) {
    if (region != nullptr && entry.second->region != region) return false;
    regions.push_back(std::move(entry.second->region));
    return true;
  });
}

WindowTable::Found WindowTable::find(uint64_t id, uint64_t generation, WindowAccess access,
                                     const std::vector<Range>& ranges) const {
  const std::lock_guard lock(mutex_);
  const auto found = windows_.find(id);
  if (found == windows_.end() || found->second->generation != generation) {
    return {nullptr, Status::kStale, "the window was withdrawn"};
  }
  const WindowPtr& window = found->second;
  if (window->access != access) {
    return {nullptr, Status::kRefused, "the window does not allow that"};
  }
  for (const Range& range : ranges) {
    if (range.offset > window->length || range.length > window->length - range.offset) {
      return {nullptr, Status::kRefused, "a range outside of the window"};
    }
  }
  return {window, Status::kOk, ""};
}

}  // namespace psrl::link::tcp
