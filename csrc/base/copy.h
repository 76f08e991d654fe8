// Many copies at once.
#pragma once

#include <cstddef>
#include <span>

namespace psrl {

struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t length = 0;
};

// Does them all; their targets must not overlap. Much at once goes past the caches (the targets'
// old bytes are not read first, and nothing else is pushed out), and very much by several threads:
// one core does not fill a memory bus. All is in memory, for other processors too, when it returns.
void copy_all(std::span<const Copy> copies);

}  // namespace psrl
