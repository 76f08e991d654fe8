#include "base/checksum.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace psrl {
namespace {

std::vector<std::byte> random_bytes(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(Checksum, KnownValues) {  // RFC 3720, B.4
  const std::string_view digits = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(digits))), 0xE3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0})), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xFF})), 0x62A8AB43u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Checksum, FastAndPortableAgreeAtEverySize) {
  for (const size_t size : {1, 7, 8, 9, 63, 64, 4095, 4096, 12287, 12288, 12289, 30011, 100000}) {
    const auto bytes = random_bytes(size);
    EXPECT_EQ(crc32c(bytes), crc32c_portable(bytes)) << size;
    EXPECT_EQ(crc32c(ConstBytes(bytes).subspan(1)), crc32c_portable(ConstBytes(bytes).subspan(1)));
  }
}

TEST(Checksum, GoesOnOverPieces) {
  const auto bytes = random_bytes(50001);
  const ConstBytes all(bytes);
  for (const size_t cut : {0, 1, 13, 12288, 50000}) {
    EXPECT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), crc32c(all)) << cut;
  }
}

TEST(Checksum, SeesEveryFlippedBit) {
  auto bytes = random_bytes(300);
  const uint32_t before = crc32c(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(crc32c(bytes), before);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

}  // namespace
}  // namespace psrl
