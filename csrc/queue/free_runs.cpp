#include "queue/free_runs.h"

#include <algorithm>
#include <iterator>

namespace psrl {

void FreeRuns::add(uint32_t first, uint32_t length) {
  if (length == 0) return;
  uint32_t end = first + length;
  auto next = runs_.upper_bound(first);
  if (next != runs_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second >= first) {
      first = previous->first;
      end = std::max(end, previous->first + previous->second);
      size_ -= previous->second;
      runs_.erase(previous);
    }
  }
  while (next != runs_.end() && next->first <= end) {
    end = std::max(end, next->first + next->second);
    size_ -= next->second;
    next = runs_.erase(next);
  }
  runs_.emplace(first, end - first);
  size_ += end - first;
}

std::optional<uint32_t> FreeRuns::take_first(uint32_t length) {
  for (auto run = runs_.begin(); run != runs_.end(); ++run) {
    if (run->second >= length) return cut(run, run->first, length);
  }
  return std::nullopt;
}

std::optional<uint32_t> FreeRuns::take_last(uint32_t length) {
  for (auto run = runs_.end(); run != runs_.begin();) {
    --run;
    if (run->second >= length) return cut(run, run->first + run->second - length, length);
  }
  return std::nullopt;
}

uint32_t FreeRuns::cut(Runs::iterator run, uint32_t first, uint32_t length) {
  const auto [start, size] = *run;
  runs_.erase(run);
  if (first > start) runs_.emplace(start, first - start);
  if (first + length < start + size) runs_.emplace(first + length, start + size - first - length);
  size_ -= length;
  return first;
}

}  // namespace psrl
