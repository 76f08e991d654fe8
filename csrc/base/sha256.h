// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104): for the few hundred bytes of a handshake, so
// plain code without vector instructions.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace psrl {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(std::string_view data);
  // The object is used up.
  Digest finish();

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// Takes the same time wherever they differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace psrl
