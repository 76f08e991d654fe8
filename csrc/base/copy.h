// Copies of what the copier will not look at again soon.
#pragma once

#include <cstddef>

namespace psrl {

// memcpy past the caches: the target's old bytes are not read first, and nothing else is pushed
// out. Worth it from some 100 KiB on. All is in memory, for other processors too, when it returns.
void copy_past_caches(std::byte* to, const std::byte* from, size_t length);

}  // namespace psrl
