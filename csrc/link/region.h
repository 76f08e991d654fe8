// What both transports' regions have in common; each derives what it must remember of a
// registration.
#pragma once

#include <memory>

#include "base/bytes.h"
#include "link/link.h"

namespace psrl::link {

class Region {
 public:
  // Read-only if the segment is mapped so.
  explicit Region(const std::shared_ptr<Segment>& segment);
  Region(Bytes memory, std::shared_ptr<const void> owner);
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // A checked part of it, to be read from or written to. Both raise LinkError.
  const std::byte* read(uint64_t offset, uint64_t length) const;
  std::byte* write(uint64_t offset, uint64_t length) const;

  const Bytes bytes;  // empty for memory that was given read-only
  const ConstBytes const_bytes;
  const bool writable;
  const MemoryKind memory_kind;
  const int32_t numa_node;                  // of the first byte; -1: unknown
  const std::shared_ptr<const void> owner;  // keeps the memory
};

}  // namespace psrl::link
