// A record: some fields of one row, written once, self-describing.
//
//   RecordHeader | description | payload of each field, 64-byte aligned
//
// The description (key, partition, tag and the fields' names, types, shapes and places) is encoded
// little-endian and checksummed; a record can be read, and found again, without any other table.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "queue/layout.h"

namespace psrl {

// Where a record is. Valid as long as the extent has that generation.
struct RecordRef {
  uint32_t extent = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;  // from the extent's start
  uint64_t length = 0;
};

struct Field {
  std::string name;
  std::string dtype;  // NumPy typestring
  std::vector<uint64_t> shape;
  uint64_t offset = 0;  // from the record's start; filled in by plan_record
  uint64_t nbytes = 0;  // likewise
};

struct Description {
  std::string partition;
  std::string key;
  std::string tag;  // opaque bytes
  std::vector<Field> fields;
};

// Fills in the fields' places and sizes; returns the record's length.
uint64_t plan_record(Description& description);

// The encoded description of a planned record.
std::string encode(const Description& description);

// Reads the record at the start of `record` and checks it whole. Raises ChecksumMismatch.
Description decode(ConstBytes record);

// Reads an encoded description of a record of `length` bytes, which may come from another node: no
// field lies outside of the record. Raises ChecksumMismatch.
Description decode_description(ConstBytes encoded, uint64_t length);

}  // namespace psrl
