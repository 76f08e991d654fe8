#include "base/copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace psrl {
namespace {

TEST(Copy, EveryByteAndNoOther) {
  std::vector<std::byte> from(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (const size_t length : {0, 1, 63, 64, 1023, 1024, 1025, 1151, 4000}) {
    for (const size_t start : {0, 1, 31, 64}) {
      std::vector<std::byte> to(5000, std::byte{0xEE});
      copy_past_caches(to.data() + start, from.data() + 3, length);
      for (size_t i = 0; i < to.size(); ++i) {
        const bool inside = i >= start && i < start + length;
        ASSERT_EQ(to[i], inside ? from[3 + i - start] : std::byte{0xEE}) << length << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace psrl
