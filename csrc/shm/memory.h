// How much memory this process may still take: the tightest of the host and its memory cgroups.
#pragma once

#include <cstdint>
#include <string>

namespace psrl {

// Bytes that can be touched before the host or a cgroup (v2 or v1, any ancestor) runs out.
// Page cache that the kernel would drop first counts as available. `root` is prepended to
// /proc and /sys, for tests.
uint64_t memory_available(const std::string& root = "");

}  // namespace psrl
