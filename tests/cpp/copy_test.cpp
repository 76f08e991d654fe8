#include "base/copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace psrl {
namespace {

std::vector<std::byte> pattern(size_t length) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

// Whatever sizes and places: every byte, and no other.
TEST(Copy, EveryByteAndNoOther) {
  const size_t totals[] = {1000, 200 * 1000, 40 << 20};
  for (const size_t total : totals) {
    const auto from = pattern(total + 8);
    std::vector<std::byte> to(2 * total + 100000, std::byte{0xEE});
    auto expected = to;
    std::vector<Copy> copies;
    size_t at = 3, place = 1, length = 0;
    while (at < from.size()) {
      const size_t size = std::min(length, from.size() - at);
      copies.push_back({to.data() + place, from.data() + at, size});
      std::memcpy(expected.data() + place, from.data() + at, size);
      at += size;
      place += size + place % 3;
      length = length * 2 + 1 > total / 5 ? 0 : length * 2 + 1;
    }
    copy_all(copies);
    EXPECT_EQ(std::memcmp(to.data(), expected.data(), to.size()), 0) << total;
  }
  copy_all({});
}

}  // namespace
}  // namespace psrl
