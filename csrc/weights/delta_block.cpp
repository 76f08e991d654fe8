#include "weights/delta_block.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/checksum.h"
#include "base/errors.h"
#include "weights/delta_code.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace psrl::weights {
namespace {

using delta::apply_step;
using delta::ChangeDecoder;
using delta::ChangeEncoder;
using delta::flipped;
using delta::load;

enum Mode : uint8_t { kSame = 0, kCoded = 1, kPlain = 2 };

constexpr size_t kTile = size_t{64} << 10;  // compared at once; stays in the second cache

[[noreturn]] void malformed(const std::string& what) {
  throw StorageError("delta: a malformed patch: " + what);
}

template <class Word>
int32_t step_between(Word from, Word to) {
  return static_cast<std::make_signed_t<Word>>(static_cast<Word>(flipped(to) - flipped(from)));
}

// Calls `with(Word{})` with the unsigned type of the item's size.
template <class With>
auto dispatch(Item item, With with) {
  switch (item) {
    case Item::kFloat16:
      return with(uint16_t{});
    case Item::kFloat32:
      return with(uint32_t{});
    default:
      return with(uint8_t{});
  }
}

// --- Comparing -----------------------------------------------------------------------------------

constexpr size_t kLane = 64;  // items compared at once: a bit each

std::atomic<bool> portable_forced = false;

// The places of the items that differ, counted from `first`; returns their end.
template <class Word>
uint32_t* compare_portable(ConstBytes base, ConstBytes next, uint32_t first, uint32_t* places) {
  constexpr size_t kPerLoad = sizeof(uint64_t) / sizeof(Word);
  const size_t num_items = base.size() / sizeof(Word);
  for (size_t i = 0; i < num_items; i += kPerLoad) {  // sections are multiples of 64 bytes
    const size_t index = i / kPerLoad;
    uint64_t both = load<uint64_t>(base.data(), index) ^ load<uint64_t>(next.data(), index);
    for (size_t k = 0; both != 0; ++k, both = both >> (4 * sizeof(Word)) >> (4 * sizeof(Word))) {
      *places = first + static_cast<uint32_t>(i + k);
      places += static_cast<Word>(both) != 0;
    }
  }
  return places;
}

#if defined(__x86_64__)

#define PSRL_AVX2 __attribute__((target("avx2,bmi,popcnt")))

PSRL_AVX2 inline __m256i both_of(const std::byte* a, const std::byte* b, size_t index) {
  const auto* left = reinterpret_cast<const __m256i*>(a) + index;
  const auto* right = reinterpret_cast<const __m256i*>(b) + index;
  return _mm256_xor_si256(_mm256_loadu_si256(left), _mm256_loadu_si256(right));
}

// A bit for each of kLane items: do they differ?
template <class Word>
PSRL_AVX2 inline uint64_t differing(const std::byte* a, const std::byte* b) {
  const __m256i zero = _mm256_setzero_si256();
  uint64_t same = 0;
  if constexpr (sizeof(Word) == 1) {
    for (size_t i = 0; i < 2; ++i) {
      const __m256i equal = _mm256_cmpeq_epi8(both_of(a, b, i), zero);
      same |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))} << (32 * i);
    }
  } else if constexpr (sizeof(Word) == 2) {
    for (size_t i = 0; i < 2; ++i) {
      const __m256i low = _mm256_cmpeq_epi16(both_of(a, b, 2 * i), zero);
      const __m256i high = _mm256_cmpeq_epi16(both_of(a, b, 2 * i + 1), zero);
      const __m256i equal = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
      same |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(equal))} << (32 * i);
    }
  } else {
    for (size_t i = 0; i < 8; ++i) {
      const __m256i equal = _mm256_cmpeq_epi32(both_of(a, b, i), zero);
      same |= uint64_t{static_cast<uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)))}
              << (8 * i);
    }
  }
  return ~same;
}

// Writes the places of the bits in `mask` and returns the end. Four at a time without asking, as a
// wrong guess costs more: what is written too much is overwritten next time.
PSRL_AVX2 inline uint32_t* put_places(uint64_t mask, uint32_t place, uint32_t* at) {
  uint32_t* const end = at + _mm_popcnt_u64(mask);
  do {
    for (size_t i = 0; i < 4; ++i) {
      at[i] = place + static_cast<uint32_t>(_tzcnt_u64(mask));  // 64 if none is left
      mask &= mask - 1;
    }
    at += 4;
  } while (at < end);
  return end;
}

template <class Word>
PSRL_AVX2 uint32_t* compare_avx2(ConstBytes base, ConstBytes next, uint32_t first,
                                 uint32_t* places) {
  const size_t step = kLane * sizeof(Word);
  size_t at = 0;
  for (; at + step <= base.size(); at += step) {
    const uint64_t mask = differing<Word>(base.data() + at, next.data() + at);
    places = put_places(mask, first + static_cast<uint32_t>(at / sizeof(Word)), places);
  }
  return compare_portable<Word>(base.subspan(at), next.subspan(at),
                                first + static_cast<uint32_t>(at / sizeof(Word)), places);
}

#endif

template <class Word>
size_t compare(ConstBytes base, ConstBytes next, uint32_t first, uint32_t* places) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
  if (avx2 && !portable_forced.load(std::memory_order_relaxed)) {
    return static_cast<size_t>(compare_avx2<Word>(base, next, first, places) - places);
  }
#endif
  return static_cast<size_t>(compare_portable<Word>(base, next, first, places) - places);
}

// --- Applying ------------------------------------------------------------------------------------

// A chunk in the making. Each tile is copied from the base, changed, summed and written out while
// it is in the first cache; what is written goes past the caches, as in a large memcpy.
class Chunk {
 public:
  Chunk(ConstBytes base, Bytes out, uint32_t index)
      : base_(base), out_(out), checksum_(index), size_(std::min(kTile, base.size())) {
    std::memcpy(tile_.data(), base_.data(), size_);
  }

  // Where the byte at `offset` is while it can be changed; tiles before its own are done with.
  std::byte* at(size_t offset) {
    while (offset >= end()) turn();
    return tile_.data() + (offset - begin_);
  }
  size_t end() const { return begin_ + size_; }  // of the tile
  void plain(size_t offset, ConstBytes bytes) {
    while (!bytes.empty()) {
      std::byte* const to = at(offset);
      const size_t size = std::min(bytes.size(), end() - offset);
      std::memcpy(to, bytes.data(), size);
      bytes = bytes.subspan(size);
      offset += size;
    }
  }
  // Writes what is left; returns the checksum of all.
  uint32_t finish() {
    while (begin_ < base_.size()) turn();
    written();
    return checksum_;
  }

 private:
  static constexpr size_t kTile = size_t{24} << 10;  // two strides of crc32c

  void turn() {
    checksum_ = crc32c({tile_.data(), size_}, checksum_);
    write();
    begin_ += size_;
    size_ = std::min(kTile, base_.size() - begin_);
    std::memcpy(tile_.data(), base_.data() + begin_, size_);
  }

#if defined(__x86_64__)
  void write() {
    std::byte* const to = out_.data() + begin_;
    if (reinterpret_cast<uintptr_t>(to) % kLine != 0) {
      std::memcpy(to, tile_.data(), size_);
      return;
    }
    for (size_t at = 0; at < size_; at += kLine) {  // chunks are multiples of a line
      const auto* from = reinterpret_cast<const __m128i*>(tile_.data() + at);
      auto* line = reinterpret_cast<__m128i*>(to + at);
      for (size_t i = 0; i < kLine / sizeof(__m128i); ++i) {
        _mm_stream_si128(line + i, _mm_load_si128(from + i));
      }
    }
  }
  void written() { _mm_sfence(); }  // before anyone is told that the bytes are there
#else
  void write() { std::memcpy(out_.data() + begin_, tile_.data(), size_); }
  void written() {}
#endif

  static constexpr size_t kLine = kAlignment;
  alignas(kLine) std::array<std::byte, kTile> tile_;
  ConstBytes base_;
  Bytes out_;
  uint32_t checksum_;
  size_t begin_ = 0;
  size_t size_;
};

void apply_changes(const Section& section, ConstBytes& body, Chunk& chunk) {
  const ChangeDecoder decoder(body);
  dispatch(section.item, [&](auto word) {
    using Word = decltype(word);
    decoder.apply<Word>(section.size / sizeof(Word), [&](uint64_t place) {
      const size_t offset = section.begin + place * sizeof(Word);
      std::byte* const item = chunk.at(offset);
      return delta::Window{item - place * sizeof(Word),
                           place + (chunk.end() - offset) / sizeof(Word)};
    });
  });
}

}  // namespace

void force_portable_comparison(bool force) { portable_forced = force; }

uint32_t chunk_checksum(ConstBytes chunk, uint64_t index) {
  return crc32c(chunk, static_cast<uint32_t>(index));
}

// --- Layout --------------------------------------------------------------------------------------

DeltaLayout::DeltaLayout(const std::vector<Run>& runs) {
  uint64_t end = 0;
  for (const Run& run : runs) {
    if (run.end <= end || run.end % kAlignment != 0) {
      throw StorageError("delta: a run of items ends at " + std::to_string(run.end) +
                         " bytes, the one before it at " + std::to_string(end));
    }
    if (run.item != Item::kByte && run.item != Item::kFloat16 && run.item != Item::kFloat32) {
      throw StorageError("delta: items of " + std::to_string(static_cast<int>(run.item)) +
                         " bytes");
    }
    end = run.end;
    if (!runs_.empty() && runs_.back().item == run.item) {
      runs_.back().end = end;
    } else {
      runs_.push_back(run);
    }
  }
  if (runs_.empty()) throw StorageError("delta: an empty layout");
  if (chunks_of(end) >> 32 != 0) throw StorageError("delta: a version is too large");
}

uint32_t DeltaLayout::block_bytes(uint32_t block) const {
  if (block >= num_blocks()) throw StorageError("delta: no block " + std::to_string(block));
  return static_cast<uint32_t>(std::min(kChunkBytes, data_bytes() - block * kChunkBytes));
}

std::vector<Section> DeltaLayout::sections(uint32_t block) const {
  const uint64_t begin = block * kChunkBytes;
  const uint64_t end = begin + block_bytes(block);
  std::vector<Section> sections;
  uint64_t at = begin;
  auto run = std::ranges::upper_bound(runs_, begin, {}, &Run::end);
  for (; at < end; ++run) {
    const uint64_t stop = std::min(run->end, end);
    sections.push_back(
        {static_cast<uint32_t>(at - begin), static_cast<uint32_t>(stop - at), run->item});
    at = stop;
  }
  return sections;
}

// --- Encoding ------------------------------------------------------------------------------------

struct BlockEncoder::Scratch {
  ChangeEncoder encoder;
  std::vector<uint32_t> places = std::vector<uint32_t>(kTile + 4);
  std::vector<int32_t> steps = std::vector<int32_t>(kTile);
};

namespace {

static_assert(std::is_trivially_copyable_v<BlockHeader> && sizeof(BlockHeader) == 16);
static_assert(kChunkBytes <= delta::kMaxItems);

// Is it the shortest way from one item to another?
bool fits(Item item, int32_t step) {
  const int unused = 32 - 8 * static_cast<int>(item);
  return step != 0 && step == static_cast<int32_t>(static_cast<uint32_t>(step) << unused) >> unused;
}

void finish_section(ChangeEncoder& encoder, ConstBytes next, std::vector<std::byte>& out) {
  const size_t mode = out.size();
  out.push_back(static_cast<std::byte>(kSame));
  if (encoder.count() == 0) return;
  if (encoder.finish(out, next.size())) {
    out[mode] = static_cast<std::byte>(kCoded);
  } else {
    out[mode] = static_cast<std::byte>(kPlain);
    out.insert(out.end(), next.begin(), next.end());
  }
}

// Appends a block whose body `write_body` appends.
template <class WriteBody>
void append_block(BlockHeader header, std::vector<std::byte>& out, WriteBody write_body) {
  const size_t start = out.size();
  out.resize(start + sizeof(header));
  write_body();
  out.resize(out.size() + delta::kPadding);
  header.body_bytes = static_cast<uint32_t>(out.size() - start - sizeof(header));
  std::memcpy(out.data() + start, &header, sizeof(header));
}

}  // namespace

BlockEncoder::BlockEncoder(DeltaLayout layout)
    : layout_(std::move(layout)), scratch_(std::make_unique<Scratch>()) {}

BlockEncoder::~BlockEncoder() = default;

void BlockEncoder::require_size(uint32_t block, size_t size) const {
  if (size != layout_.block_bytes(block)) {
    throw StorageError("delta: block " + std::to_string(block) + " has " +
                       std::to_string(layout_.block_bytes(block)) + " bytes, not " +
                       std::to_string(size));
  }
}

void BlockEncoder::encode(uint32_t block, ConstBytes base, ConstBytes next, uint32_t base_checksum,
                          uint32_t next_checksum, std::vector<std::byte>& out) {
  require_size(block, base.size());
  require_size(block, next.size());
  ChangeEncoder& encoder = scratch_->encoder;
  uint32_t* const places = scratch_->places.data();
  int32_t* const steps = scratch_->steps.data();
  const auto encode_section = [&](const Section& section) {
    dispatch(section.item, [&](auto word) {
      using Word = decltype(word);
      encoder.reset();
      for (size_t at = 0; at < section.size; at += kTile) {
        const size_t size = std::min(kTile, section.size - at);
        const ConstBytes from = base.subspan(section.begin + at, size);
        const ConstBytes to = next.subspan(section.begin + at, size);
        const auto first = static_cast<uint32_t>(at / sizeof(Word));
        const size_t count = compare<Word>(from, to, first, places);
        for (size_t i = 0; i < count; ++i) {
          const size_t place = places[i] - first;
          steps[i] = step_between(load<Word>(from.data(), place), load<Word>(to.data(), place));
        }
        encoder.add({places, count}, {steps, count});
      }
    });
    finish_section(encoder, next.subspan(section.begin, section.size), out);
  };
  append_block({block, 0, base_checksum, next_checksum}, out, [&] {
    for (const Section& section : layout_.sections(block)) encode_section(section);
  });
}

uint32_t BlockEncoder::encode(uint32_t block, const Changes& changes, ConstBytes base,
                              uint32_t base_checksum, Bytes next, std::vector<std::byte>& out) {
  require_size(block, base.size());
  require_size(block, next.size());
  const std::span<const uint32_t> offsets = changes.offsets;
  if (offsets.size() != changes.steps.size()) {
    throw StorageError("delta: " + std::to_string(offsets.size()) + " places, " +
                       std::to_string(changes.steps.size()) + " steps");
  }
  const std::vector<Section> sections = layout_.sections(block);
  if (base.data() < next.data() + next.size() && next.data() < base.data() + base.size()) {
    throw StorageError("delta: a chunk cannot be changed in place");
  }
  // All is looked at before anything is written.
  size_t at = 0;
  uint32_t free_from = 0;
  for (const Section& section : sections) {
    const auto size = static_cast<uint32_t>(section.item);
    for (; at < offsets.size() && offsets[at] < section.begin + section.size; ++at) {
      if (offsets[at] < free_from || (offsets[at] - section.begin) % size != 0 ||
          !fits(section.item, changes.steps[at])) {
        throw StorageError("delta: change " + std::to_string(at) + " of block " +
                           std::to_string(block) + " does not fit");
      }
      free_from = offsets[at] + size;
    }
  }
  if (at != offsets.size()) throw StorageError("delta: a change lies outside of its block");

  std::memcpy(next.data(), base.data(), base.size());
  ChangeEncoder& encoder = scratch_->encoder;
  std::vector<uint32_t> places;
  size_t begin = 0;
  const auto encode_section = [&](const Section& section) {
    const auto size = static_cast<uint32_t>(section.item);
    size_t end = begin;
    places.clear();
    for (; end < offsets.size() && offsets[end] < section.begin + section.size; ++end) {
      places.push_back((offsets[end] - section.begin) / size);
    }
    const std::span<const int32_t> steps = changes.steps.subspan(begin, end - begin);
    encoder.reset();
    encoder.add(places, steps);
    dispatch(section.item, [&](auto word) {
      using Word = decltype(word);
      std::byte* const items = next.data() + section.begin;
      for (size_t i = 0; i < steps.size(); ++i) {
        apply_step<Word>(items + places[i] * sizeof(Word), steps[i]);
      }
    });
    finish_section(encoder, ConstBytes(next).subspan(section.begin, section.size), out);
    begin = end;
  };
  const size_t start = out.size();
  append_block({block, 0, base_checksum, 0}, out, [&] {
    for (const Section& section : sections) encode_section(section);
  });
  const uint32_t checksum = chunk_checksum(next, block);
  std::memcpy(out.data() + start + offsetof(BlockHeader, result_checksum), &checksum,
              sizeof(checksum));
  return checksum;
}

// --- Reading -------------------------------------------------------------------------------------

Block Block::take(ConstBytes& in) {
  Block block;
  if (in.size() < sizeof(BlockHeader)) malformed("a block's header is cut off");
  std::memcpy(&block.header, in.data(), sizeof(BlockHeader));
  in = in.subspan(sizeof(BlockHeader));
  if (in.size() < block.header.body_bytes) malformed("a block is cut off");
  block.body = in.first(block.header.body_bytes);
  in = in.subspan(block.header.body_bytes);
  return block;
}

uint32_t apply_block(const DeltaLayout& layout, const Block& block, ConstBytes base,
                     uint32_t base_checksum, Bytes out) {
  const uint32_t index = block.header.index;
  const std::string name = "delta: block " + std::to_string(index);
  const std::vector<Section> sections = layout.sections(index);
  const uint32_t size = layout.block_bytes(index);
  if (base.size() != size || out.size() != size) {
    throw StorageError(name + " has " + std::to_string(size) + " bytes, its base " +
                       std::to_string(base.size()) + ", its target " + std::to_string(out.size()));
  }
  if (base.data() < out.data() + size && out.data() < base.data() + size) {
    throw StorageError(name + " cannot be applied in place");
  }
  if (base_checksum != block.header.base_checksum) {
    throw StorageError(name + " was made from another base: its checksum is " +
                       std::to_string(block.header.base_checksum) + ", not " +
                       std::to_string(base_checksum));
  }
  Chunk chunk(base, out, index);
  ConstBytes body = block.body;
  for (const Section& section : sections) {
    if (body.size() < 1 + delta::kPadding) malformed(name + " ends early");
    const auto mode = static_cast<uint8_t>(body[0]);
    body = body.subspan(1);
    if (mode == kCoded) {
      apply_changes(section, body, chunk);
    } else if (mode == kPlain) {
      if (body.size() < section.size + delta::kPadding) malformed(name + " ends early");
      chunk.plain(section.begin, body.first(section.size));
      body = body.subspan(section.size);
    } else if (mode != kSame) {
      malformed(name + " has a section of mode " + std::to_string(mode));
    }
  }
  if (body.size() != delta::kPadding) malformed(name + " has more bytes than sections");
  const uint32_t checksum = chunk.finish();
  if (checksum != block.header.result_checksum) {
    const bool base_damaged = chunk_checksum(base, index) != base_checksum;
    throw ChecksumMismatch(name + (base_damaged ? ": the base is not what its checksum says"
                                                : ": what came out is not what was sent"));
  }
  return checksum;
}

}  // namespace psrl::weights
