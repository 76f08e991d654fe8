#include "base/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace psrl {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

using Table = std::array<std::array<uint32_t, 256>, 8>;

// Slicing by 8: table[k][b] is the register after byte b and k zero bytes.
constexpr Table make_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (size_t k = 1; k < table.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = table[k - 1][byte];
      table[k][byte] = (crc >> 8) ^ table[0][crc & 0xFF];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

uint64_t load64(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__)

constexpr size_t kLane = 4096;  // bytes of one of the three streams

// What kLane zero bytes do to the register is linear over GF(2), so it is the xor of what they do
// to each byte of it: four tables. They shift one stream's result past the next stream.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

Shift make_shift() {
  Shift shift{};
  std::array<uint32_t, 32> image{};
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t i = 0; i < kLane; ++i) crc = (crc >> 8) ^ kTable[0][crc & 0xFF];
    image[bit] = crc;
  }
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (int bit = 0; bit < 8; ++bit) {
        if (byte >> bit & 1) shift[k][byte] ^= image[8 * k + bit];
      }
    }
  }
  return shift;
}

uint32_t shift_lane(const Shift& shift, uint32_t crc) {
  return shift[0][crc & 0xFF] ^ shift[1][crc >> 8 & 0xFF] ^ shift[2][crc >> 16 & 0xFF] ^
         shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(ConstBytes data, uint32_t seed) {
  static const Shift shift = make_shift();
  uint64_t crc = ~seed;
  const std::byte* p = data.data();
  size_t left = data.size();
  // One crc32 instruction a cycle is possible, but each waits three cycles for the last of its
  // stream.
  for (; left >= 3 * kLane; p += 3 * kLane, left -= 3 * kLane) {
    uint64_t a = crc;
    uint64_t b = 0;
    uint64_t c = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, load64(p + i));
      b = _mm_crc32_u64(b, load64(p + kLane + i));
      c = _mm_crc32_u64(c, load64(p + 2 * kLane + i));
    }
    b ^= shift_lane(shift, static_cast<uint32_t>(a));
    crc = c ^ shift_lane(shift, static_cast<uint32_t>(b));
  }
  for (; left >= 8; p += 8, left -= 8) crc = _mm_crc32_u64(crc, load64(p));
  auto tail = static_cast<uint32_t>(crc);
  for (; left > 0; ++p, --left) tail = _mm_crc32_u8(tail, static_cast<uint8_t>(*p));
  return ~tail;
}

#endif

}  // namespace

uint32_t crc32c_portable(ConstBytes data, uint32_t seed) {
  uint32_t crc = ~seed;
  const std::byte* p = data.data();
  size_t left = data.size();
  for (; left >= 8; p += 8, left -= 8) {
    const uint64_t word = load64(p) ^ crc;  // little-endian hosts, as all of PSRL
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTable[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; left > 0; ++p, --left)
    crc = (crc >> 8) ^ kTable[0][(crc ^ static_cast<uint8_t>(*p)) & 0xFF];
  return ~crc;
}

uint32_t crc32c(ConstBytes data, uint32_t seed) {
#if defined(__x86_64__)
  static const bool sse42 = __builtin_cpu_supports("sse4.2");
  if (sse42) return crc32c_sse42(data, seed);
#endif
  return crc32c_portable(data, seed);
}

}  // namespace psrl
