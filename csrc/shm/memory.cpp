#include "shm/memory.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace psrl {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The whole of a small file; empty if it cannot be read. No iostreams: a process that has loaded
// another C++ runtime (as some builds of numerical libraries bring along) may parse numbers as 0
// with them.
std::string read_file(const std::string& path) {
  std::string text;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return text;
  char buffer[4096];
  for (size_t count; (count = std::fread(buffer, 1, sizeof buffer, file)) > 0;) {
    text.append(buffer, count);
  }
  std::fclose(file);
  return text;
}

std::optional<uint64_t> parse_number(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// Calls `visit` with each line until it returns true.
template <typename Visit>
void for_each_line(const std::string& text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (visit(std::string_view(text).substr(at, end - at))) return;
    at = end + 1;
  }
}

// The number in a one-line file; nothing for "max" or a missing file.
std::optional<uint64_t> read_number(const std::string& path) {
  return parse_number(read_file(path));
}

// The value of `key` in a file of "key value" lines.
std::optional<uint64_t> read_entry(const std::string& path, std::string_view key) {
  std::optional<uint64_t> found;
  for_each_line(read_file(path), [&](std::string_view line) {
    if (line.size() <= key.size() || line.substr(0, key.size()) != key) return false;
    const char next = line[key.size()];
    if (next != ' ' && next != '\t') return false;
    found = parse_number(line.substr(key.size()));
    return true;
  });
  return found;
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

  for_each_line(read_file(root + "/proc/self/cgroup"), [&](std::string_view line) {
    const size_t first = line.find(':');  // "hierarchy:controllers:path"
    const size_t second = line.find(':', first + 1);
    if (first == std::string_view::npos || second == std::string_view::npos) return false;
    const std::string controllers(line.substr(first + 1, second - first - 1));
    std::string path(line.substr(second + 1));
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
    return false;
  });
  return available;
}

}  // namespace psrl
