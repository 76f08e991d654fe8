#include "queue/reader.h"

#include "base/errors.h"

namespace psrl {

QueueReader::QueueReader(std::shared_ptr<Arena> arena, ClientId client)
    : arena_(std::move(arena)), client_(client) {
  arena_->check_client(client);
}

RecordView QueueReader::read(const RecordRef& ref) const {
  RecordView view;
  view.lease = std::make_shared<Lease>(arena_, client_, ref.extent, ref.generation);
  const ConstBytes data = arena_->data(ref.extent, arena_->extent(ref.extent).run.load());
  if (ref.offset % kAlignment != 0 || ref.length < sizeof(RecordHeader) ||
      ref.offset > data.size() || ref.length > data.size() - ref.offset) {
    throw UnknownKey("no record at byte " + std::to_string(ref.offset) + " of extent " +
                     std::to_string(ref.extent));
  }
  view.bytes = data.subspan(ref.offset, ref.length);
  const auto* header = reinterpret_cast<const RecordHeader*>(view.bytes.data());
  if (header->magic != kRecordMagic ||
      header->state.load(std::memory_order_acquire) !=
          static_cast<uint32_t>(RecordState::kCommitted) ||
      header->length != ref.length) {
    throw UnknownKey("no committed record at byte " + std::to_string(ref.offset) + " of extent " +
                     std::to_string(ref.extent) + ": the row is cleared");
  }
  view.description = decode(view.bytes);
  return view;
}

}  // namespace psrl
