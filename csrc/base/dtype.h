// Element types as NumPy's typestrings ("<f4", "|b1", "<U5"), which name byte order and width.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace psrl {

// Bytes of one element. Raises StorageError for what cannot be shared as plain bytes (objects,
// structures).
uint64_t item_size(std::string_view typestring);

// Bytes of an array; raises StorageError if they do not fit in 63 bits.
uint64_t array_bytes(std::string_view typestring, std::span<const uint64_t> shape);

}  // namespace psrl
