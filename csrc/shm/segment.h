// A segment: shared memory of one node as a sealed memfd.
//
// Life cycle: the node agent creates it (zeroed, pre-faulted, sealed against any change of size)
// and hands the descriptor to every process that maps it. It ends with the last descriptor or
// mapping, however that process ended; nothing is left in any file system. A new creation under an
// old name has a new generation, so a reference into the old one can be told apart.
//
// Layout: one header page {magic, sizes, kind, generation, name}, then `size()` bytes of data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/fd.h"

namespace psrl {

enum class MemoryKind : uint32_t { kHost = 0 };

enum class Access { kReadWrite, kReadOnly };

class Segment {
 public:
  // A new segment of `size` zeroed bytes, all pages present. Raises StorageError if the host or a
  // memory cgroup has too little, naming `config_key` as what to lower.
  static std::shared_ptr<Segment> create(const std::string& name, uint64_t size,
                                         const std::string& config_key);

  // Maps the segment behind `fd`, which stays the caller's. Raises StorageError if it is not a
  // sealed segment of the size that its header says.
  static std::shared_ptr<Segment> attach(int fd, Access access = Access::kReadWrite);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  const std::string& name() const { return name_; }
  uint64_t size() const { return size_; }
  uint64_t generation() const { return generation_; }
  MemoryKind memory_kind() const { return memory_kind_; }
  Access access() const { return access_; }
  int fd() const { return fd_.get(); }

  // The data. Raises StorageError when mapped read-only.
  Bytes bytes();
  ConstBytes bytes() const { return const_bytes(); }
  ConstBytes const_bytes() const;
  // A checked part of the data.
  Bytes bytes(uint64_t offset, uint64_t length);
  ConstBytes const_bytes(uint64_t offset, uint64_t length) const;

 private:
  Segment(Fd fd, Access access, uint64_t mapped);

  Fd fd_;
  Access access_;
  std::byte* base_ = nullptr;
  uint64_t mapped_ = 0;
  std::string name_;
  uint64_t size_ = 0;
  uint64_t generation_ = 0;
  MemoryKind memory_kind_ = MemoryKind::kHost;
};

}  // namespace psrl
