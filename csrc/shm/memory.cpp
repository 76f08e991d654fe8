#include "shm/memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace psrl {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The number in a one-line file; nothing for "max" or a missing file.
std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The value of `key` in a file of "key value" lines.
std::optional<uint64_t> read_entry(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

struct CgroupFiles {
  std::string mount;
  std::string limit;
  std::string usage;
  std::string reclaimable;  // key in memory.stat
};

// The tightest headroom of the cgroup `path` and its ancestors up to the mount.
uint64_t cgroup_headroom(const CgroupFiles& files, std::string path) {
  uint64_t headroom = kUnlimited;
  while (true) {
    const std::string directory = files.mount + path;
    const auto limit = read_number(directory + "/" + files.limit);
    const auto usage = read_number(directory + "/" + files.usage);
    if (limit && usage) {
      const uint64_t cache = read_entry(directory + "/memory.stat", files.reclaimable).value_or(0);
      const uint64_t used = *usage - std::min(*usage, cache);
      headroom = std::min(headroom, *limit - std::min(*limit, used));
    }
    if (path.empty()) return headroom;
    path.resize(path.rfind('/'));  // "/a/b" -> "/a" -> ""
  }
}

}  // namespace

uint64_t memory_available(const std::string& root) {
  uint64_t available = kUnlimited;
  if (const auto kib = read_entry(root + "/proc/meminfo", "MemAvailable:")) available = *kib * 1024;

  std::ifstream cgroups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {  // "hierarchy:controllers:path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    // "/" is the namespace's own root; a path outside of the namespace ("/../x") has no files here.
    if (path == "/" || path.find("..") != std::string::npos) path.clear();
    const std::string padded = "," + controllers + ",";
    if (controllers.empty()) {
      available = std::min(available, cgroup_headroom({root + "/sys/fs/cgroup", "memory.max",
                                                       "memory.current", "inactive_file"},
                                                      path));
    } else if (padded.find(",memory,") != std::string::npos) {
      available = std::min(available,
                           cgroup_headroom({root + "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                            "memory.usage_in_bytes", "total_inactive_file"},
                                           path));
    }
  }
  return available;
}

}  // namespace psrl
