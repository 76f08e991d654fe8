#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/errors.h"
#include "shm/memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace psrl {
namespace {

constexpr uint64_t kMagic = 0x31474553'4C525350;  // "PSRLSEG1"
constexpr uint64_t kHeaderBytes = 4096;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

struct Header {
  uint64_t magic;
  uint64_t generation;
  uint64_t size;
  uint32_t memory_kind;
  uint32_t name_length;
  char name[256];
};
static_assert(sizeof(Header) <= kHeaderBytes);

uint64_t random_generation() {
  uint64_t value = 0;
  while (value == 0) {  // 0 means "no segment"
    if (::getrandom(&value, sizeof(value), 0) != sizeof(value)) throw_errno("getrandom");
  }
  // Below 2^63, so that it is a plain integer in every message format.
  return value >> 1 | 1;
}

// Makes every page present now: first touch later would cost ten times a warm copy, and memory that
// is not there should be said here rather than by a SIGBUS in a reader.
void populate(std::byte* base, uint64_t length, const std::string& name) {
  if (::madvise(base, length, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_errno("segment " + name + ": cannot populate its memory");
  for (uint64_t at = 0; at < length; at += 4096) {  // kernels before 5.14
    *reinterpret_cast<volatile char*>(base + at) = 0;
  }
}

}  // namespace

Segment::Segment(Fd fd, Access access, uint64_t mapped)
    : fd_(std::move(fd)), access_(access), mapped_(mapped) {
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = ::mmap(nullptr, mapped, protection, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED)
    throw_errno("cannot map a segment of " + std::to_string(mapped) + " bytes");
  base_ = static_cast<std::byte*>(base);
}

Segment::~Segment() {
  if (base_ != nullptr) ::munmap(base_, mapped_);
}

std::shared_ptr<Segment> Segment::create(const std::string& name, uint64_t size,
                                         const std::string& config_key) {
  if (name.empty() || name.size() > sizeof(Header::name)) {
    throw StorageError("a segment's name has 1 to 256 bytes, not " + std::to_string(name.size()));
  }
  const uint64_t available = memory_available();
  if (size == 0 || size > available || available - size < kHeaderBytes) {
    throw StorageError("segment " + name + " needs " + std::to_string(size) + " bytes, " +
                       std::to_string(available) + " bytes of memory are available; lower " +
                       config_key);
  }
  const uint64_t total = kHeaderBytes + align_up(size, 4096);
  Fd fd(::memfd_create(("psrl:" + name).substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("memfd_create for segment " + name);
  if (::ftruncate(fd.get(), static_cast<off_t>(total)) != 0) {
    throw_errno("segment " + name + " of " + std::to_string(size) + " bytes");
  }
  // Sealed, a reader can never meet SIGBUS because someone truncated the file under it.
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) {
    throw_errno("sealing segment " + name);
  }
  std::shared_ptr<Segment> segment(new Segment(std::move(fd), Access::kReadWrite, total));
  populate(segment->base_, total, name);

  Header header{};
  header.generation = random_generation();
  header.size = size;
  header.memory_kind = static_cast<uint32_t>(MemoryKind::kHost);
  header.name_length = static_cast<uint32_t>(name.size());
  std::memcpy(header.name, name.data(), name.size());
  header.magic = kMagic;
  std::memcpy(segment->base_, &header, sizeof(header));

  segment->name_ = name;
  segment->size_ = size;
  segment->generation_ = header.generation;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int fd, Access access) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) throw_errno("not a segment: fd " + std::to_string(fd));
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw StorageError("fd " + std::to_string(fd) + " is not a segment: its size is not sealed");
  }
  const auto total = static_cast<uint64_t>(info.st_size);
  if (total <= kHeaderBytes) {
    throw StorageError("fd " + std::to_string(fd) + " is not a segment: " + std::to_string(total) +
                       " bytes");
  }
  // A descriptor of its own, opened with no more rights than asked for, so that the mapping cannot
  // be made writable later (and a GPU driver can register it as read-only).
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  Fd own(::open(path.c_str(), (access == Access::kReadOnly ? O_RDONLY : O_RDWR) | O_CLOEXEC));
  if (!own) throw_errno("cannot open " + path);
  std::shared_ptr<Segment> segment(new Segment(std::move(own), access, total));

  Header header;
  std::memcpy(&header, segment->base_, sizeof(header));
  if (header.magic != kMagic) {
    throw StorageError("fd " + std::to_string(fd) + " is not a segment: wrong magic");
  }
  if (header.name_length > sizeof(header.name) || header.size > total - kHeaderBytes ||
      align_up(header.size, 4096) != total - kHeaderBytes) {
    throw StorageError("fd " + std::to_string(fd) + ": header says " + std::to_string(header.size) +
                       " bytes, the file has " + std::to_string(total));
  }
  if (header.memory_kind != static_cast<uint32_t>(MemoryKind::kHost)) {
    throw StorageError("fd " + std::to_string(fd) + ": unknown memory kind");
  }
  segment->name_.assign(header.name, header.name_length);
  segment->size_ = header.size;
  segment->generation_ = header.generation;
  return segment;
}

ConstBytes Segment::const_bytes() const { return {base_ + kHeaderBytes, size_}; }

Bytes Segment::bytes() {
  if (access_ == Access::kReadOnly) throw StorageError("segment " + name_ + " is mapped read-only");
  return {base_ + kHeaderBytes, size_};
}

ConstBytes Segment::const_bytes(uint64_t offset, uint64_t length) const {
  if (offset > size_ || length > size_ - offset) {
    throw StorageError("segment " + name_ + ": bytes " + std::to_string(offset) + " + " +
                       std::to_string(length) + " are outside of its " + std::to_string(size_));
  }
  return const_bytes().subspan(offset, length);
}

Bytes Segment::bytes(uint64_t offset, uint64_t length) {
  const ConstBytes part = const_bytes(offset, length);
  return bytes().subspan(offset, part.size());
}

}  // namespace psrl
