// One block of a patch: what turns a chunk of one version into the same chunk of the next.
//
//   BlockHeader | for each section: a mode, then nothing, changes (delta_code.h) or plain bytes |
//   kPadding bytes
//
// A block is a chunk of the weight store, so its two checksums are those that the slots already
// carry: encoding computes none, and the one that applying computes is the one that sealing needs.
// A section is the part of a block whose items have the same size. Sections follow from the layout
// and are not transmitted. Blocks are independent: they can be made, sent and applied as chunks
// come, and in any order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "weights/layout.h"

namespace psrl::weights {

// How the bits of an item are read as a number, so that steps are small. Floats: sign and magnitude
// become one ascending line, -0 just below +0, so that a step counts representable values (ulps).
// A bijection on all bit patterns, NaN and infinities included.
enum class Item : uint8_t { kByte = 1, kFloat16 = 2, kFloat32 = 4 };  // the value is the size

// The items of the bytes up to `end` (from where the run before ends).
struct Run {
  uint64_t end = 0;
  Item item = Item::kByte;
};

struct Section {
  uint32_t begin = 0;  // in its block
  uint32_t size = 0;
  Item item = Item::kByte;
};

class DeltaLayout {
 public:
  // StorageError unless the runs ascend in multiples of 64 bytes.
  explicit DeltaLayout(const std::vector<Run>& runs);

  uint64_t data_bytes() const { return runs_.back().end; }
  uint32_t num_blocks() const { return static_cast<uint32_t>(chunks_of(data_bytes())); }
  uint32_t block_bytes(uint32_t block) const;
  std::vector<Section> sections(uint32_t block) const;

 private:
  std::vector<Run> runs_;
};

// The checksum that the store keeps of chunk `index`.
uint32_t chunk_checksum(ConstBytes chunk, uint64_t index);

struct BlockHeader {
  uint32_t index = 0;
  uint32_t body_bytes = 0;
  uint32_t base_checksum = 0;
  uint32_t result_checksum = 0;
};

// Takes a whole block off the front of `in`. StorageError if it is cut off.
struct Block {
  static Block take(ConstBytes& in);
  BlockHeader header;
  ConstBytes body;
};

// Changes of one block, as they come from a comparison made elsewhere: for each the place of its
// item in bytes from the block's start, ascending, and the step to add to the item's number.
struct Changes {
  std::span<const uint32_t> offsets;
  std::span<const int32_t> steps;
};

// Makes blocks; keeps its memory between them. One thread at a time.
class BlockEncoder {
 public:
  explicit BlockEncoder(DeltaLayout layout);
  ~BlockEncoder();

  // Appends the block that makes `next` of `base`, whose checksums are given.
  void encode(uint32_t block, ConstBytes base, ConstBytes next, uint32_t base_checksum,
              uint32_t next_checksum, std::vector<std::byte>& out);
  // The same block from the changes alone. Writes the chunk that they make of `base` into `next`
  // and returns its checksum. StorageError for changes that do not fit.
  uint32_t encode(uint32_t block, const Changes& changes, ConstBytes base, uint32_t base_checksum,
                  Bytes next, std::vector<std::byte>& out);

 private:
  struct Scratch;
  void require_size(uint32_t block, size_t size) const;

  DeltaLayout layout_;
  std::unique_ptr<Scratch> scratch_;
};

// Makes the next version's chunk in `out`, which must not overlap `base`, and returns its checksum.
// `base_checksum` is what the store keeps of `base`. StorageError if the block is malformed or made
// from another base; ChecksumMismatch if what comes out is not what went in. `out` is then garbage.
uint32_t apply_block(const DeltaLayout& layout, const Block& block, ConstBytes base,
                     uint32_t base_checksum, Bytes out);

// The portable twin of the comparison, for tests: the same blocks, without vector instructions.
void force_portable_comparison(bool force);

}  // namespace psrl::weights
