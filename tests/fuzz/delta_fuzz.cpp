// Any bytes as the block of a patch, under libFuzzer. With CXX=clang++ and -DPSRL_BUILD_FUZZERS=ON
// -DPSRL_SANITIZE=fuzzer-no-link,address,undefined: `delta_fuzz -runs=1000000`.
#include <cstdlib>
#include <cstring>

#include "base/errors.h"
#include "weights/delta_block.h"

namespace psrl::weights {
namespace {

constexpr uint64_t kSize = 64 << 10;

// The first byte chooses the items, the second whether the block's header is made to fit.
void apply_any(ConstBytes input) {
  static const std::vector<std::byte> base(kSize, std::byte{0x3C});
  static const uint32_t base_checksum = chunk_checksum(base, 0);
  static const std::vector<DeltaLayout> layouts{
      DeltaLayout({{kSize, Item::kFloat16}}),
      DeltaLayout({{kSize, Item::kFloat32}}),
      DeltaLayout({{kSize, Item::kByte}}),
      DeltaLayout({{64, Item::kByte}, {8192, Item::kFloat32}, {kSize, Item::kFloat16}}),
  };
  if (input.size() < 2 + sizeof(BlockHeader)) return;
  const DeltaLayout& layout = layouts[static_cast<size_t>(input[0]) % layouts.size()];
  std::vector<std::byte> coded(input.begin() + 2, input.end());
  if (static_cast<unsigned>(input[1]) % 8 != 0) {
    BlockHeader header;
    std::memcpy(&header, coded.data(), sizeof(header));
    header.index = 0;
    header.body_bytes = static_cast<uint32_t>(coded.size() - sizeof(header));
    header.base_checksum = base_checksum;
    std::memcpy(coded.data(), &header, sizeof(header));
  }
  std::vector<std::byte> out(kSize);
  try {
    ConstBytes in = coded;
    const Block block = Block::take(in);
    apply_block(layout, block, base, base_checksum, out);
    if (chunk_checksum(out, 0) != block.header.result_checksum) std::abort();
  } catch (const StorageError&) {
  }
}

}  // namespace
}  // namespace psrl::weights

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  psrl::weights::apply_any(std::as_bytes(std::span(data, size)));
  return 0;
}
