// The header page of a segment, whatever was written there by who made it.
#include <sys/mman.h>

#include <cstring>

#include "base/errors.h"
#include "fuzz.h"
#include "shm/segment.h"

namespace psrl::fuzz {
namespace {

constexpr uint64_t kSize = 5000, kHeader = 512;

// The first page too, which a Segment does not show.
struct Page {
  std::shared_ptr<Segment> segment = Segment::create("a segment", kSize, "a key");
  char* bytes = static_cast<char*>(
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd(), 0));
};

Page& page() {
  static Page page;
  return page;
}

}  // namespace

std::vector<std::string> seeds() { return {std::string(page().bytes, kHeader)}; }

void feed(std::string_view input) {
  static const std::string good = seeds()[0];
  std::memcpy(page().bytes, good.data(), kHeader);
  std::memcpy(page().bytes, input.data(), std::min<size_t>(input.size(), kHeader));
  try {
    const auto segment = Segment::attach(page().segment->fd(), Access::kReadOnly);
    require(segment->size() <= 2 * 4096 && segment->name().size() <= 256);
    const ConstBytes bytes = segment->const_bytes();
    require(bytes.empty() || bytes.front() == bytes.back());
  } catch (const StorageError&) {
  }
}

}  // namespace psrl::fuzz
