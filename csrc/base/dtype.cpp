#include "base/dtype.h"

#include <charconv>
#include <string>

#include "base/errors.h"

namespace psrl {

uint64_t item_size(std::string_view typestring) {
  constexpr std::string_view kOrders = "<>|=";
  constexpr std::string_view kKinds = "biufcSU";
  uint32_t width = 0;
  const char* end = typestring.data() + typestring.size();
  if (typestring.size() >= 3 && kOrders.find(typestring[0]) != std::string_view::npos &&
      kKinds.find(typestring[1]) != std::string_view::npos) {
    const auto parsed = std::from_chars(typestring.data() + 2, end, width);
    // NumPy makes one byte of a text of width 0, which would be a byte beyond the field.
    if (parsed.ec == std::errc() && parsed.ptr == end && width > 0) {
      return typestring[1] == 'U' ? uint64_t{4} * width : width;
    }
  }
  throw StorageError("dtype " + std::string(typestring) +
                     " cannot be stored: only bool, integer, float, complex and fixed-width text");
}

uint64_t array_bytes(std::string_view typestring, std::span<const uint64_t> shape) {
  uint64_t bytes = item_size(typestring);
  for (const uint64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes) || bytes >> 62 != 0) {
      throw StorageError("an array too large to store");
    }
  }
  return bytes;
}

}  // namespace psrl
