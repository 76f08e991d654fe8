#include "queue/record.h"

#include <cstring>

#include "base/checksum.h"
#include "base/dtype.h"
#include "base/errors.h"

namespace psrl {
namespace {

constexpr size_t kMaxText = 1 << 20;  // of a key, tag or name
constexpr size_t kMaxFields = 4096;
constexpr size_t kMaxDimensions = 64;

void put_number(std::string& out, uint64_t value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_text(std::string& out, std::string_view text) {
  put_number(out, text.size());
  out.append(text);
}

[[noreturn]] void malformed(const char* what) {
  throw ChecksumMismatch(std::string("malformed record: ") + what);
}

class Parser {
 public:
  explicit Parser(ConstBytes data) : data_(data) {}

  uint64_t number() {
    uint64_t value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  uint64_t number_below(uint64_t limit) {
    const uint64_t value = number();
    if (value > limit) malformed("a count is out of range");
    return value;
  }
  std::string text() {
    const uint64_t length = number_below(kMaxText);
    return {reinterpret_cast<const char*>(take(length)), length};
  }

 private:
  const std::byte* take(size_t length) {
    if (length > data_.size()) malformed("it ends early");
    const std::byte* start = data_.data();
    data_ = data_.subspan(length);
    return start;
  }

  ConstBytes data_;
};

uint64_t encoded_bytes(const Description& d) {
  uint64_t bytes = 4 * 8 + d.partition.size() + d.key.size() + d.tag.size();
  for (const Field& f : d.fields) {
    bytes += 5 * 8 + f.name.size() + f.dtype.size() + 8 * f.shape.size();
  }
  return bytes;
}

}  // namespace

uint64_t plan_record(Description& description) {
  for (const std::string* text : {&description.partition, &description.key, &description.tag}) {
    if (text->size() > kMaxText) throw StorageError("a key or tag is over 1 MiB");
  }
  if (description.fields.size() > kMaxFields) throw StorageError("a row has over 4096 fields");
  uint64_t end = align_up(sizeof(RecordHeader) + encoded_bytes(description));
  for (Field& field : description.fields) {
    if (field.name.size() > kMaxText || field.shape.size() > kMaxDimensions) {
      throw StorageError("field " + field.name.substr(0, 64) + ": name or number of dimensions");
    }
    field.nbytes = array_bytes(field.dtype, field.shape);
    field.offset = end;
    end = align_up(end + field.nbytes);
  }
  return end;
}

std::string encode(const Description& description) {
  std::string out;
  out.reserve(encoded_bytes(description));
  put_text(out, description.partition);
  put_text(out, description.key);
  put_text(out, description.tag);
  put_number(out, description.fields.size());
  for (const Field& field : description.fields) {
    put_text(out, field.name);
    put_text(out, field.dtype);
    put_number(out, field.shape.size());
    for (const uint64_t extent : field.shape) put_number(out, extent);
    put_number(out, field.offset);
    put_number(out, field.nbytes);
  }
  return out;
}

Description decode(ConstBytes record) {
  if (record.size() < sizeof(RecordHeader)) malformed("no room for a header");
  const auto* header = reinterpret_cast<const RecordHeader*>(record.data());
  if (header->magic != kRecordMagic) malformed("wrong magic");
  // Read once: the memory is shared, and what was checked must be what is used.
  const uint64_t length = header->length;
  const uint64_t meta_bytes = header->meta_bytes;
  if (length > record.size() || length < sizeof(RecordHeader) ||
      meta_bytes > length - sizeof(RecordHeader)) {
    malformed("lengths do not agree");
  }
  const ConstBytes meta = record.subspan(sizeof(RecordHeader), meta_bytes);
  if (crc32c(meta) != header->checksum) malformed("checksum of its description");
  return decode_description(meta, length);
}

Description decode_description(ConstBytes encoded, uint64_t length) {
  Parser parser(encoded);
  Description description;
  description.partition = parser.text();
  description.key = parser.text();
  description.tag = parser.text();
  description.fields.resize(parser.number_below(kMaxFields));
  for (Field& field : description.fields) {
    field.name = parser.text();
    field.dtype = parser.text();
    field.shape.resize(parser.number_below(kMaxDimensions));
    for (uint64_t& extent : field.shape) extent = parser.number();
    field.offset = parser.number();
    field.nbytes = parser.number();
    if (field.offset > length || field.nbytes > length - field.offset ||
        array_bytes(field.dtype, field.shape) != field.nbytes) {
      malformed("a field lies outside");
    }
  }
  return description;
}

}  // namespace psrl
