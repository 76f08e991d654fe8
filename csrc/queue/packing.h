// A ragged batch: the values of each field of many rows, one after the other in one buffer, and the
// offsets that tell them apart.
//
// It is planned from descriptions alone, so rows may be on other nodes: those of this process are
// copied in, the pieces of others are listed for whoever has the bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "queue/record.h"

namespace psrl {

// The fields of a row that one record gives.
struct RowPiece {
  uint32_t record = 0;  // index
  std::vector<std::string> fields;
};

// What is read of one record. `bytes` are empty if they are elsewhere.
struct PackSource {
  Description description;
  ConstBytes bytes;
};

struct PackedColumn {
  std::string name;
  std::string dtype;
  bool scalar = false;           // rows have shape (): one value each
  std::vector<uint64_t> item;    // shape of one value: of a row's field without its first dimension
  std::vector<int64_t> offsets;  // in values: row r has those from offsets[r] to offsets[r + 1]
  uint64_t place = 0;            // in the buffer
  uint64_t nbytes = 0;
};

// One contiguous copy.
struct PackPart {
  uint64_t record = 0;  // index
  uint64_t offset = 0;  // in the record
  uint64_t length = 0;
  uint64_t place = 0;  // in the buffer
};

class Packing {
 public:
  // `names` of every row; none: those of the first row, which the others must have too. Raises
  // UnknownKey if a row lacks one, StorageError if rows cannot stand in one column.
  Packing(std::vector<PackSource> sources, const std::vector<std::vector<RowPiece>>& rows,
          const std::optional<std::vector<std::string>>& names);

  const std::vector<PackedColumn>& columns() const { return columns_; }
  uint64_t num_bytes() const { return num_bytes_; }

  // Copies what is here into a buffer of num_bytes().
  void copy(Bytes buffer) const;

  // What is elsewhere, of the records from `first` to `end`.
  std::vector<PackPart> parts(uint64_t first, uint64_t end) const;

 private:
  void add_column(const std::string& name, const std::vector<std::vector<RowPiece>>& rows);

  std::vector<PackSource> sources_;
  std::vector<PackedColumn> columns_;
  std::vector<PackPart> parts_;
  uint64_t num_bytes_ = 0;
};

}  // namespace psrl
