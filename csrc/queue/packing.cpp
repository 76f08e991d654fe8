#include "queue/packing.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/dtype.h"
#include "base/errors.h"

namespace psrl {
namespace {

std::string shape_text(std::span<const uint64_t> shape) {
  std::string text = "(";
  for (const uint64_t extent : shape) text += std::to_string(extent) + ",";
  return text + ")";
}

std::string whose(const Description& description, const std::string& name) {
  return "field " + name + " of key " + description.key + " of partition " + description.partition;
}

}  // namespace

Packing::Packing(std::vector<PackSource> sources, const std::vector<std::vector<RowPiece>>& rows,
                 const std::optional<std::vector<std::string>>& names)
    : sources_(std::move(sources)) {
  for (const auto& row : rows) {
    for (const RowPiece& piece : row) {
      if (piece.record >= sources_.size())
        throw StorageError("a row names a record that is not there");
    }
  }
  std::vector<std::string> chosen;
  if (names) {
    chosen = *names;
  } else if (!rows.empty()) {
    for (const RowPiece& piece : rows[0]) {
      chosen.insert(chosen.end(), piece.fields.begin(), piece.fields.end());
    }
    for (const auto& row : rows) {
      size_t num_fields = 0;
      for (const RowPiece& piece : row) num_fields += piece.fields.size();
      if (num_fields > chosen.size()) {
        throw UnknownKey(
            "rows have different fields, so they cannot be packed; select fields that "
            "all have");
      }
    }
  }
  for (const std::string& name : chosen) add_column(name, rows);
}

void Packing::add_column(const std::string& name, const std::vector<std::vector<RowPiece>>& rows) {
  PackedColumn column;
  column.name = name;
  column.place = num_bytes_;
  column.offsets.reserve(rows.size() + 1);
  column.offsets.push_back(0);
  const Description* first = nullptr;
  for (const auto& row : rows) {
    const Field* found = nullptr;
    uint32_t record = 0;
    for (const RowPiece& piece : row) {
      if (std::find(piece.fields.begin(), piece.fields.end(), name) == piece.fields.end()) continue;
      for (const Field& field : sources_[piece.record].description.fields) {
        if (field.name == name) found = &field;
      }
      record = piece.record;
    }
    if (found == nullptr) {
      throw UnknownKey(row.empty()
                           ? "a row has no field " + name
                           : whose(sources_[row[0].record].description, name) + " is not there");
    }
    const Description& description = sources_[record].description;
    const bool scalar = found->shape.empty();
    const std::span<const uint64_t> item =
        scalar ? std::span<const uint64_t>{} : std::span(found->shape).subspan(1);
    if (first == nullptr) {
      first = &description;
      column.dtype = found->dtype;
      column.scalar = scalar;
      column.item.assign(item.begin(), item.end());
    } else if (found->dtype != column.dtype || scalar != column.scalar ||
               !std::equal(item.begin(), item.end(), column.item.begin(), column.item.end())) {
      throw StorageError(whose(description, name) + " is " + found->dtype + " " +
                         shape_text(found->shape) + ", that of key " + first->key + " " +
                         column.dtype + " with values of " + shape_text(column.item) +
                         ": they cannot stand in one column");
    }
    column.offsets.push_back(column.offsets.back() +
                             static_cast<int64_t>(scalar ? 1 : found->shape[0]));
    if (found->nbytes > 0) {
      parts_.push_back({record, found->offset, found->nbytes, column.place + column.nbytes});
      column.nbytes += found->nbytes;
    }
  }
  if (first == nullptr) column.dtype = "|u1";
  num_bytes_ = align_up(column.place + column.nbytes);
  columns_.push_back(std::move(column));
}

void Packing::copy(Bytes buffer) const {
  if (buffer.size() < num_bytes_) {
    throw StorageError("a buffer of " + std::to_string(buffer.size()) + " bytes cannot hold " +
                       std::to_string(num_bytes_));
  }
  for (const PackPart& part : parts_) {
    const ConstBytes bytes = sources_[part.record].bytes;
    if (bytes.empty()) continue;
    std::memcpy(buffer.data() + part.place, bytes.subspan(part.offset, part.length).data(),
                part.length);
  }
}

std::vector<PackPart> Packing::parts(uint64_t first, uint64_t end) const {
  std::vector<PackPart> found;
  for (const PackPart& part : parts_) {
    if (part.record >= first && part.record < end && sources_[part.record].bytes.empty()) {
      found.push_back(part);
    }
  }
  return found;
}

}  // namespace psrl
