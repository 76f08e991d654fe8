// Little-endian numbers in and out of byte strings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace psrl::link {

template <typename T>
void put(std::string& out, std::type_identity_t<T> value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i) & 0xff));
  }
}

// The caller has checked that the bytes are there.
template <typename T>
T get(std::string_view in, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(in[at + i])) << (8 * i);
  }
  return static_cast<T>(value);
}

}  // namespace psrl::link
