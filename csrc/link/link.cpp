#include "link/link.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "base/errors.h"
#include "link/region.h"
#include "link/wire.h"

namespace psrl::link {
namespace {

// get_mempolicy(2) by hand: libnuma is not needed for one question.
int32_t numa_node_of(const std::byte* address) {
  constexpr unsigned long kNodeOfAddress = 1 | 2;  // MPOL_F_NODE | MPOL_F_ADDR
  int node = -1;
  if (::syscall(SYS_get_mempolicy, &node, nullptr, 0, address, kNodeOfAddress) != 0) return -1;
  return node;
}

void check_range(uint64_t offset, uint64_t length, uint64_t size) {
  if (offset > size || length > size - offset) {
    throw LinkError("bytes " + std::to_string(offset) + " + " + std::to_string(length) +
                    " are outside of the region's " + std::to_string(size));
  }
}

// Advert on a wire, little-endian: u16 version, u8 access, u8 memory kind, i32 numa node, u64
// window, u64 generation, u64 length, u16 key length, key.
constexpr uint16_t kAdvertVersion = 1;
constexpr size_t kAdvertBytes = 34;

}  // namespace

Region::Region(const std::shared_ptr<Segment>& segment)
    : bytes(segment->access() == Access::kReadWrite ? segment->bytes() : Bytes()),
      const_bytes(segment->const_bytes()),
      writable(segment->access() == Access::kReadWrite),
      memory_kind(segment->memory_kind()),
      numa_node(numa_node_of(const_bytes.data())),
      owner(segment) {}

Region::Region(Bytes memory, std::shared_ptr<const void> owner)
    : bytes(memory),
      const_bytes(memory),
      writable(true),
      memory_kind(MemoryKind::kHost),
      numa_node(numa_node_of(memory.data())),
      owner(std::move(owner)) {}

const std::byte* Region::read(uint64_t offset, uint64_t length) const {
  check_range(offset, length, const_bytes.size());
  return const_bytes.data() + offset;
}

std::byte* Region::write(uint64_t offset, uint64_t length) const {
  if (!writable) throw LinkError("the region is mapped read-only");
  check_range(offset, length, bytes.size());
  return bytes.data() + offset;
}

std::string Advert::encode() const {
  if (key.size() > kMaxAdvertBytes - kAdvertBytes) {
    throw LinkError("an advert's key has " + std::to_string(key.size()) + " bytes");
  }
  std::string out;
  out.reserve(kAdvertBytes + key.size());
  put<uint16_t>(out, kAdvertVersion);
  put<uint8_t>(out, static_cast<uint8_t>(access));
  put<uint8_t>(out, static_cast<uint8_t>(memory_kind));
  put<int32_t>(out, numa_node);
  put<uint64_t>(out, window);
  put<uint64_t>(out, generation);
  put<uint64_t>(out, length);
  put<uint16_t>(out, static_cast<uint16_t>(key.size()));
  return out += key;
}

Advert Advert::decode(std::string_view encoded) {
  if (encoded.size() < kAdvertBytes || encoded.size() > kMaxAdvertBytes) {
    throw LinkError("not an advert: " + std::to_string(encoded.size()) + " bytes");
  }
  if (const auto version = get<uint16_t>(encoded, 0); version != kAdvertVersion) {
    throw LinkError("an advert of version " + std::to_string(version) + ", not " +
                    std::to_string(kAdvertVersion));
  }
  Advert advert;
  const auto access = get<uint8_t>(encoded, 2);
  const auto kind = get<uint8_t>(encoded, 3);
  if (access != static_cast<uint8_t>(WindowAccess::kPut) &&
      access != static_cast<uint8_t>(WindowAccess::kPull)) {
    throw LinkError("an advert of unknown access " + std::to_string(access));
  }
  if (kind != static_cast<uint8_t>(MemoryKind::kHost)) {
    throw LinkError("an advert of unknown memory kind " + std::to_string(kind));
  }
  advert.access = static_cast<WindowAccess>(access);
  advert.memory_kind = static_cast<MemoryKind>(kind);
  advert.numa_node = get<int32_t>(encoded, 4);
  advert.window = get<uint64_t>(encoded, 8);
  advert.generation = get<uint64_t>(encoded, 16);
  advert.length = get<uint64_t>(encoded, 24);
  if (get<uint16_t>(encoded, 32) != encoded.size() - kAdvertBytes) {
    throw LinkError("an advert whose key is cut or followed by more");
  }
  advert.key = encoded.substr(kAdvertBytes);
  return advert;
}

}  // namespace psrl::link
