// Which extents are free, as runs of neighbours. Plain memory of the manager, rebuilt from the
// arena's tables when it starts.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace psrl {

class FreeRuns {
 public:
  // Adds extents; those that are there already stay once.
  void add(uint32_t first, uint32_t length);

  // Removes `length` neighbours: the first ones that there are, or the last ones. Single extents
  // are found in a step; a run looks at each gap at most once.
  std::optional<uint32_t> take_first(uint32_t length);
  std::optional<uint32_t> take_last(uint32_t length);

  uint64_t size() const { return size_; }

 private:
  using Runs = std::map<uint32_t, uint32_t>;  // first extent -> length; runs never touch
  uint32_t cut(Runs::iterator run, uint32_t first, uint32_t length);

  Runs runs_;
  uint64_t size_ = 0;
};

}  // namespace psrl
