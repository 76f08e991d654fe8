// Byte spans and alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace psrl {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// Rows' fields, weight tensors and extents start at multiples of this: a cache line, and what
// vector loads and DMA like.
inline constexpr uint64_t kAlignment = 64;

constexpr uint64_t align_up(uint64_t value, uint64_t alignment = kAlignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace psrl
