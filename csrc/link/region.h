// What both transports' regions have in common; each derives what it must remember of a registration.
#pragma once

#include <memory>

#include "base/bytes.h"
#include "base/errors.h"
#include "link/link.h"

namespace psrl::link {

class Region {
 public:
  virtual ~Region() = default;

  // Empty for memory that was given read-only.
  Bytes bytes;
  ConstBytes const_bytes;
  bool writable = true;
  MemoryKind memory_kind = MemoryKind::kHost;
  std::shared_ptr<const void> owner;  // keeps the memory
};

}  // namespace psrl::link
