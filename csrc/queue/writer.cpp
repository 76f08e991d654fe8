#include "queue/writer.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/copy.h"
#include "base/errors.h"

namespace psrl {
namespace {

uint64_t wall_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

PendingRecord::PendingRecord(PendingRecord&& other) noexcept
    : arena_(std::move(other.arena_)),
      client_(other.client_),
      ref_(other.ref_),
      header_(std::exchange(other.header_, nullptr)) {}

PendingRecord& PendingRecord::operator=(PendingRecord&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(client_, other.client_);
  std::swap(ref_, other.ref_);
  std::swap(header_, other.header_);
  return *this;
}

RecordRef PendingRecord::commit() {
  if (header_ == nullptr) throw StorageError("this record is committed already");
  arena_->check_client(client_);
  header_->written_ns = wall_ns();
  // Everything written before is visible to whoever sees the flag.
  auto writing = static_cast<uint32_t>(RecordState::kWriting);
  if (!header_->state.compare_exchange_strong(
          writing, static_cast<uint32_t>(RecordState::kCommitted), std::memory_order_release)) {
    header_ = nullptr;
    throw Revoked("the record was aborted: its writer counts as dead");
  }
  header_ = nullptr;
  return ref_;
}

PendingRecord::~PendingRecord() {
  if (header_ == nullptr || !arena_->maker().here()) return;
  // A client that was released has nothing there any more; the extent may be another's by now.
  if (arena_->client(client_.number).incarnation.load() != client_.incarnation) return;
  auto writing = static_cast<uint32_t>(RecordState::kWriting);
  if (header_->state.compare_exchange_strong(writing,
                                             static_cast<uint32_t>(RecordState::kAborted))) {
    arena_->extent(ref_.extent).live.fetch_sub(1);
  }
}

QueueWriter::QueueWriter(std::shared_ptr<Arena> arena, ClientId client)
    : arena_(std::move(arena)), client_(client) {
  arena_->check_client(client);
}

void QueueWriter::add(std::span<const Grant> grants) {
  const std::lock_guard lock(mutex_);
  for (const Grant& grant : grants) {
    arena_->data(grant.extent, grant.run);  // checks the range
    const auto same = [&](const Grant& other) { return other.extent == grant.extent; };
    if (std::none_of(grants_.begin(), grants_.end(), same)) grants_.push_back(grant);
  }
}

std::vector<uint32_t> QueueWriter::held() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> extents;
  for (const Grant& grant : grants_) extents.push_back(grant.extent);
  return extents;
}

bool QueueWriter::owns(const Grant& grant) const {
  const ExtentEntry& extent = arena_->extent(grant.extent);
  return extent.word.load() == extent_word(grant.generation, ExtentState::kGranted) &&
         extent.owner.load() == client_.number &&
         extent.owner_incarnation.load() == client_.incarnation;
}

void QueueWriter::seal(const Grant& grant) {
  uint64_t granted = extent_word(grant.generation, ExtentState::kGranted);
  if (owns(grant)) {
    arena_->extent(grant.extent)
        .word.compare_exchange_strong(granted, extent_word(grant.generation, ExtentState::kSealed));
  }
}

void QueueWriter::seal() {
  const std::lock_guard lock(mutex_);
  for (const Grant& grant : grants_) seal(grant);
  grants_.clear();
}

std::optional<QueueWriter::Slot> QueueWriter::allocate(uint64_t length) {
  const std::lock_guard lock(mutex_);
  // A record larger than an extent leaves the single extents in hand alone: it takes a run.
  const bool large = length > arena_->extent_bytes();
  for (auto grant = grants_.begin(); grant != grants_.end();) {
    if (!owns(*grant)) throw Revoked("extents were taken away: this client counts as dead");
    ExtentEntry& extent = arena_->extent(grant->extent);
    const uint64_t capacity = grant->run * arena_->extent_bytes();
    const uint64_t offset = extent.bump.load();
    if (offset > capacity || length > capacity - offset) {
      // Full for rows of this size; the next extent goes on. (Small rows might still fit, but one
      // open extent at a time is what bounds the space that a writer holds.)
      if (large && grant->run == 1) {
        ++grant;
      } else {
        seal(*grant);
        grant = grants_.erase(grant);
      }
      continue;
    }
    auto* header =
        reinterpret_cast<RecordHeader*>(arena_->data(grant->extent, grant->run).data() + offset);
    header->magic = kRecordMagic;
    header->length = length;
    header->meta_bytes = 0;
    header->state.store(static_cast<uint32_t>(RecordState::kWriting));
    // Counted from now on, so a seal by another thread cannot give the extent back under us.
    extent.live.fetch_add(1);
    extent.bump.store(offset + length, std::memory_order_release);
    const Slot slot{{grant->extent, grant->generation, offset, length}, header};
    if (large) {  // a run has room for no other large row
      seal(*grant);
      grants_.erase(grant);
    }
    return slot;
  }
  return std::nullopt;
}

void QueueWriter::begin(std::span<const PlannedRecord> records,
                        std::vector<PendingRecord>& pending) {
  arena_->check_client(client_);
  std::vector<Copy> copies;
  for (const PlannedRecord& planned : records) {
    const auto slot = allocate(planned.length);
    if (!slot) break;
    pending.push_back(PendingRecord(arena_, client_, slot->ref, slot->header));

    auto* record = reinterpret_cast<std::byte*>(slot->header);
    const std::string meta = encode(planned.description);
    std::memcpy(record + sizeof(RecordHeader), meta.data(), meta.size());
    slot->header->meta_bytes = static_cast<uint32_t>(meta.size());
    slot->header->checksum = crc32c(std::as_bytes(std::span(meta)));
    for (size_t i = 0; i < planned.payload.size(); ++i) {
      const Field& field = planned.description.fields.at(i);
      const ConstBytes bytes = planned.payload[i];
      if (bytes.size() != field.nbytes) {
        throw StorageError("field " + field.name + ": " + std::to_string(bytes.size()) +
                           " bytes were given, its shape needs " + std::to_string(field.nbytes));
      }
      copies.push_back({record + field.offset, bytes.data(), bytes.size()});
    }
  }
  copy_all(copies);
}

}  // namespace psrl
