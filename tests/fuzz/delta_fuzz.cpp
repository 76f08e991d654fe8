// Blocks of patches: whatever they say, what comes out is what they promised, or is refused.
#include <cstring>

#include "base/errors.h"
#include "fuzz.h"
#include "weights/delta.h"

namespace psrl::fuzz {
namespace {

using namespace weights;

constexpr uint64_t kSize = 4 << 10;

const std::vector<DeltaLayout>& layouts() {
  static const std::vector<DeltaLayout> layouts{
      DeltaLayout({{kSize, Item::kFloat16}}),
      DeltaLayout({{kSize, Item::kFloat32}}),
      DeltaLayout({{kSize, Item::kByte}}),
      DeltaLayout({{64, Item::kByte}, {2048, Item::kFloat32}, {kSize, Item::kFloat16}}),
  };
  return layouts;
}

const std::vector<std::byte>& base() {
  static const std::vector<std::byte> base(kSize, std::byte{0x3C});
  return base;
}

uint32_t base_checksum() {
  static const uint32_t checksum = chunk_checksum(base(), 0);
  return checksum;
}

}  // namespace

// A byte that says which layout, a byte that says whether the block's header is made to fit, the
// block. And whole patches, behind a byte of 255.
std::vector<std::string> seeds() {
  std::vector<std::string> found;
  for (size_t layout = 0; layout < layouts().size(); ++layout) {
    for (const size_t every : {1, 7, 97, 2049, 1 << 20}) {
      std::vector<std::byte> next = base();
      for (size_t i = 0; i < kSize; i += every) next[i] ^= static_cast<std::byte>(1 + i % 3);
      const uint32_t checksum = chunk_checksum(next, 0);
      std::vector<std::byte> block;
      BlockEncoder(layouts()[layout]).encode(0, base(), next, base_checksum(), checksum, block);
      found.push_back(std::string{static_cast<char>(layout), 1} + text_of(block));
      const uint32_t before = base_checksum();
      const auto patch = encode_patch(layouts()[layout], {1, 1, 2, {3, 4}}, {base(), {&before, 1}},
                                      {next, {&checksum, 1}}, 1);
      found.push_back(std::string{static_cast<char>(layout), '\xFF'} + text_of(patch));
    }
  }
  return found;
}

void feed(std::string_view input) {
  if (input.size() < 2) return;
  const DeltaLayout& layout = layouts()[static_cast<unsigned char>(input[0]) % layouts().size()];
  const auto how = static_cast<unsigned char>(input[1]);
  std::string coded(input.substr(2));
  static std::vector<std::byte> out(kSize);
  try {
    ConstBytes in = bytes_of(coded);
    if (how == 0xFF) {
      const uint32_t before = base_checksum();
      const auto sums = apply_patch(layout, in, {3, 4}, {base(), {&before, 1}}, out, 1);
      require(sums.size() == 1 && sums[0] == chunk_checksum(out, 0));
      return;
    }
    if (how % 8 != 0 && coded.size() >= sizeof(BlockHeader)) {
      BlockHeader header;
      std::memcpy(&header, coded.data(), sizeof(header));
      header.index = 0;
      header.body_bytes = static_cast<uint32_t>(coded.size() - sizeof(header));
      header.base_checksum = base_checksum();
      std::memcpy(coded.data(), &header, sizeof(header));
    }
    const Block block = Block::take(in);
    require(apply_block(layout, block, base(), base_checksum(), out) == chunk_checksum(out, 0));
    require(block.header.result_checksum == chunk_checksum(out, 0));
  } catch (const StorageError&) {
  }
}

}  // namespace psrl::fuzz
