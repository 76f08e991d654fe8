// Records of the queue, as a segment holds them, and descriptions, as other nodes send them.
#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/dtype.h"
#include "base/errors.h"
#include "fuzz.h"
#include "queue/record.h"

namespace psrl::fuzz {
namespace {

std::string record_of(Description description) {
  const uint64_t length = plan_record(description);
  const std::string meta = encode(description);
  RecordHeader header{};
  header.magic = kRecordMagic;
  header.state.store(static_cast<uint32_t>(RecordState::kCommitted));
  header.length = length;
  header.meta_bytes = static_cast<uint32_t>(meta.size());
  std::string record(reinterpret_cast<const char*>(&header), sizeof(header));
  record += meta;
  record.resize(length);
  return record;
}

void require_inside(const Description& description, uint64_t length) {
  for (const Field& field : description.fields) {
    require(field.offset <= length && field.nbytes <= length - field.offset);
    require(array_bytes(field.dtype, field.shape) == field.nbytes);
  }
}

}  // namespace

std::vector<std::string> seeds() {
  const std::vector<Field> fields{{"x", "<i8", {5}}, {"y", "<f4", {2, 3}}, {"n", "|b1", {}}};
  return {record_of({"train", "key", "tag", fields}), record_of({"", "", "", {}}),
          record_of({"val", std::string(200, 'k'), "", {{"text", "<U7", {0, 4}}}})};
}

void feed(std::string_view input) {
  if (input.size() < sizeof(RecordHeader)) return;
  // As in a segment, where records begin at multiples of 64.
  static std::vector<uint64_t> memory;
  memory.assign(input.size() / sizeof(uint64_t) + 1, 0);
  std::memcpy(memory.data(), input.data(), input.size());
  const ConstBytes record{reinterpret_cast<const std::byte*>(memory.data()), input.size()};
  auto* header = reinterpret_cast<RecordHeader*>(memory.data());
  if (input.size() % 2 == 0) {  // its writer wrote nonsense, and summed it up
    const ConstBytes meta = record.subspan(sizeof(RecordHeader));
    header->checksum = crc32c(meta.first(std::min<size_t>(header->meta_bytes, meta.size())));
  }
  try {
    require_inside(decode(record), record.size());
  } catch (const StorageError&) {
  }
  try {
    require_inside(decode_description(record.subspan(sizeof(RecordHeader)), input.size()),
                   input.size());
  } catch (const StorageError&) {
  }
}

}  // namespace psrl::fuzz
