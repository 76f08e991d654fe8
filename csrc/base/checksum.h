// CRC-32C (Castagnoli): the checksum of record headers, payloads and weight chunks.
//
// With SSE4.2 (asked at run time) three streams are computed at once and joined; elsewhere tables
// are used. Both give the same value, that of iSCSI: crc32c("123456789") == 0xE3069283.
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace psrl {

// Checksum of `data`; to go on over several pieces give the result so far as `seed`.
uint32_t crc32c(ConstBytes data, uint32_t seed = 0);

// The portable twin, always compiled, so that tests can compare.
uint32_t crc32c_portable(ConstBytes data, uint32_t seed = 0);

}  // namespace psrl
