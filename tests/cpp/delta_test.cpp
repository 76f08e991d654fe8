// Patches: exact whatever the bits, close to the entropy, and total whatever the bytes.
#include "weights/delta.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "base/errors.h"
#include "weights/delta_code.h"

namespace psrl::weights {
namespace {

constexpr ManifestHash kManifest{7, 9};
using Data = std::vector<std::byte>;
using Random = std::mt19937_64;

Data random_bytes(size_t size, uint64_t seed) {
  Random random(seed);
  Data data(size);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = random();
    std::memcpy(data.data() + i, &word, std::min<size_t>(8, size - i));
  }
  return data;
}

// Moves a share of the 16-bit items by about one ulp, as an optimizer does.
Data stepped(const Data& base, double share, uint64_t seed) {
  Random random(seed);
  std::geometric_distribution<int> gap(share);
  std::geometric_distribution<int> size(0.85);
  Data next = base;
  for (size_t i = static_cast<size_t>(gap(random)); i < base.size() / 2;
       i += 1 + static_cast<size_t>(gap(random))) {
    uint16_t bits;
    std::memcpy(&bits, next.data() + 2 * i, 2);
    const int step = 1 + size(random);
    bits = static_cast<uint16_t>(bits + (random() % 2 == 0 ? step : -step));
    std::memcpy(next.data() + 2 * i, &bits, 2);
  }
  return next;
}

struct Version {
  explicit Version(Data bytes) : data(std::move(bytes)), checksums(chunk_checksums(data, 1)) {}
  VersionView view() const { return {data, checksums}; }
  Data data;
  std::vector<uint32_t> checksums;
};

DeltaLayout all(uint64_t size, Item item) { return DeltaLayout({{size, item}}); }

Data patch_of(const DeltaLayout& layout, const Version& base, const Version& next,
              unsigned num_threads = 1) {
  return encode_patch(layout, {1, 4, 5, kManifest}, base.view(), next.view(), num_threads);
}

Data applied(const DeltaLayout& layout, const Data& patch, const Version& base,
             unsigned num_threads = 1) {
  Data out(base.data.size(), std::byte{0x5A});
  apply_patch(layout, patch, kManifest, base.view(), out, num_threads);
  return out;
}

void expect_exact(const DeltaLayout& layout, const Data& before, const Data& after) {
  const Version base(before);
  const Version next(after);
  const Data patch = patch_of(layout, base, next);
  EXPECT_EQ(applied(layout, patch, base), next.data);
  force_portable_comparison(true);
  const Data twin = patch_of(layout, base, next);
  force_portable_comparison(false);
  EXPECT_EQ(twin, patch);
}

template <class Word>
Data words(const std::vector<Word>& values) {
  Data data(align_up(values.size() * sizeof(Word)));
  std::memcpy(data.data(), values.data(), values.size() * sizeof(Word));
  return data;
}

template <class Word>
Word word_at(const Data& data, size_t index) {
  Word word;
  std::memcpy(&word, data.data() + index * sizeof(Word), sizeof(Word));
  return word;
}

TEST(DeltaCode, LengthsAreThoseOfTheBestCode) {
  std::vector<uint8_t> lengths(6);
  delta::code_lengths(std::vector<uint32_t>{1, 1, 2, 4, 0, 8}, 8, lengths);
  EXPECT_EQ(lengths, (std::vector<uint8_t>{4, 4, 3, 2, 0, 1}));
  delta::code_lengths(std::vector<uint32_t>{1, 1, 2, 4, 0, 8}, 3, lengths);
  EXPECT_EQ(lengths, (std::vector<uint8_t>{3, 3, 3, 3, 0, 1}));
  delta::code_lengths(std::vector<uint32_t>{0, 0, 5, 0, 0, 0}, 3, lengths);
  EXPECT_EQ(lengths, (std::vector<uint8_t>{0, 0, 1, 0, 0, 0}));
}

TEST(DeltaCode, BucketsTileTheNumbers) {
  for (uint32_t value = 4; value < 5000; ++value) {
    const uint32_t bucket = delta::GapBucket::of(value);
    EXPECT_LE(delta::GapBucket::first(bucket), value);
    EXPECT_LT(value - delta::GapBucket::first(bucket), 1U << delta::GapBucket::raw_bits(bucket));
  }
  EXPECT_EQ(delta::GapBucket::of(4), 0U);
  EXPECT_EQ(delta::GapBucket::of(delta::kMaxItems + 3), delta::kGapBuckets - 1);
  EXPECT_LT(delta::LongBucket::of((uint32_t{1} << 31) - 2), delta::kLongSymbols);
}

TEST(DeltaLayout, RefusesRunsThatDoNotAscendInLines) {
  EXPECT_THROW(DeltaLayout({}), StorageError);
  EXPECT_THROW(DeltaLayout({{100, Item::kByte}}), StorageError);
  EXPECT_THROW(DeltaLayout({{128, Item::kByte}, {128, Item::kFloat16}}), StorageError);
  const DeltaLayout merged({{64, Item::kFloat16}, {128, Item::kFloat16}, {192, Item::kByte}});
  EXPECT_EQ(merged.sections(0).size(), 2U);
  EXPECT_THROW(merged.sections(1), StorageError);
}

TEST(DeltaBlock, StepsCrossZeroByOne) {
  // +0 to -0, -0 to the smallest negative number, the smallest positive number to +0: one ulp each,
  // so one symbol is all that the code needs, and two bits a change for it.
  std::vector<uint16_t> before;
  std::vector<uint16_t> after;
  for (int i = 0; i < 3000; ++i) {
    before.insert(before.end(), {0x0000, 0x8000, 0x0001});
    after.insert(after.end(), {0x8000, 0x8001, 0x0000});
  }
  const Version base(words(before));
  const Version next(words(after));
  const DeltaLayout layout = all(base.data.size(), Item::kFloat16);
  const Data patch = patch_of(layout, base, next);
  EXPECT_LT(patch.size(), PatchHeader::kBytes + 9000 * 2 / 8 + 100);
  EXPECT_EQ(applied(layout, patch, base), next.data);
}

TEST(DeltaBlock, AnyBitsBecomeAnyBits) {
  const std::vector<uint16_t> halves{0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF,
                                     0x7FFF, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x007F};
  std::vector<uint16_t> from;
  std::vector<uint16_t> to;
  for (const uint16_t a : halves) {
    for (const uint16_t b : halves) {
      from.push_back(a);
      to.push_back(b);
    }
  }
  expect_exact(all(align_up(2 * from.size()), Item::kFloat16), words(from), words(to));
  std::vector<uint32_t> from_wide;
  std::vector<uint32_t> to_wide;
  for (size_t i = 0; i < from.size(); ++i) {
    from_wide.push_back(uint32_t{from[i]} << 16 | to[i]);
    to_wide.push_back(uint32_t{to[i]} << 16 | from[i]);
  }
  expect_exact(all(align_up(4 * from.size()), Item::kFloat32), words(from_wide), words(to_wide));
}

TEST(DeltaBlock, IsExactAtAllDensitiesAndSizes) {
  for (const Item item : {Item::kByte, Item::kFloat16, Item::kFloat32}) {
    for (const uint64_t size : {64UL, 128UL, 4096UL, 65536UL + 64, 300032UL}) {
      const Data base = random_bytes(size, size);
      for (const double share : {0.0, 0.0005, 0.01, 0.3, 0.99}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(item) << ' ' << size << ' ' << share);
        const Data next = share == 0.0 ? base : stepped(base, share, 3);
        expect_exact(all(size, item), base, next);
      }
      expect_exact(all(size, item), base, random_bytes(size, 99));
      Data last = base;  // changes at the very ends
      last.front() ^= std::byte{1};
      last.back() ^= std::byte{0x80};
      expect_exact(all(size, item), base, last);
    }
  }
}

TEST(DeltaBlock, MixesItemsAndSpansChunks) {
  const uint64_t size = 2 * kChunkBytes + 4096;
  const DeltaLayout layout({{64, Item::kByte},
                            {640, Item::kFloat32},
                            {kChunkBytes + 128, Item::kFloat16},
                            {kChunkBytes + 192, Item::kFloat32},
                            {size, Item::kFloat16}});
  const Data base = random_bytes(size, 1);
  expect_exact(layout, base, stepped(base, 0.02, 2));
}

TEST(DeltaBlock, IsPlainWhereAllChangedAndEmptyWhereNothingDid) {
  const uint64_t size = 1 << 20;
  const Version base(random_bytes(size, 1));
  const Version other(random_bytes(size, 2));
  const DeltaLayout layout = all(size, Item::kFloat16);
  EXPECT_LT(patch_of(layout, base, other).size(), size + 200);
  EXPECT_LT(patch_of(layout, base, base).size(), 200U);
}

TEST(DeltaBlock, IsCloseToTheEntropyFloor) {
  const Version base(random_bytes(kChunkBytes, 5));
  const DeltaLayout layout = all(kChunkBytes, Item::kFloat16);
  for (const double share : {0.001, 0.011, 0.034, 0.06, 0.25}) {
    const Version next(stepped(base.data, share, 6));
    std::map<int, double> steps;
    double changed = 0;
    const double n = kChunkBytes / 2.0;
    for (size_t i = 0; i < kChunkBytes / 2; ++i) {
      const auto step =
          static_cast<int16_t>(word_at<uint16_t>(next.data, i) - word_at<uint16_t>(base.data, i));
      if (step == 0) continue;
      const bool negative = (word_at<uint16_t>(base.data, i) & 0x8000) != 0;
      ++steps[negative ? -step : step];
      ++changed;
    }
    double bits = -changed * std::log2(changed / n) - (n - changed) * std::log2(1 - changed / n);
    for (const auto& [step, count] : steps) bits -= count * std::log2(count / changed);
    const double ratio = bits / 8 / static_cast<double>(patch_of(layout, base, next).size());
    EXPECT_GT(ratio, share < 0.01 ? 0.93 : 0.97) << share;
  }
}

TEST(DeltaBlock, ComesFromChangesAsFromBytes) {
  const uint64_t size = 20480;
  const DeltaLayout layout({{4096, Item::kByte}, {8192, Item::kFloat32}, {size, Item::kFloat16}});
  const Data base = random_bytes(size, 1);
  const Data next = stepped(base, 0.05, 2);
  std::vector<uint32_t> offsets;
  std::vector<int32_t> steps;
  for (const Section& section : layout.sections(0)) {
    const auto width = static_cast<uint32_t>(section.item);
    for (uint32_t at = section.begin; at < section.begin + section.size; at += width) {
      if (std::memcmp(base.data() + at, next.data() + at, width) == 0) continue;
      offsets.push_back(at);
      if (width == 1) {
        steps.push_back(
            static_cast<int8_t>(static_cast<uint8_t>(next[at]) - static_cast<uint8_t>(base[at])));
      } else if (width == 2) {
        const auto a = word_at<int16_t>(base, at / 2);
        const auto b = word_at<int16_t>(next, at / 2);
        steps.push_back(
            static_cast<int16_t>((b ^ ((b >> 15) & 0x7FFF)) - (a ^ ((a >> 15) & 0x7FFF))));
      } else {
        const auto a = word_at<int32_t>(base, at / 4);
        const auto b = word_at<int32_t>(next, at / 4);
        steps.push_back(static_cast<int32_t>(static_cast<uint32_t>(b ^ ((b >> 31) & 0x7FFFFFFF)) -
                                             static_cast<uint32_t>(a ^ ((a >> 31) & 0x7FFFFFFF))));
      }
    }
  }
  const uint32_t sum = chunk_checksum(base, 0);
  const uint32_t next_sum = chunk_checksum(next, 0);
  BlockEncoder encoder(layout);
  Data of_bytes;
  encoder.encode(0, base, next, sum, next_sum, of_bytes);
  Data of_changes;
  Data made(size);
  EXPECT_EQ(encoder.encode(0, Changes{offsets, steps}, base, sum, made, of_changes), next_sum);
  EXPECT_EQ(made, next);
  EXPECT_EQ(of_changes, of_bytes);

  std::swap(offsets[0], offsets[1]);
  EXPECT_THROW(encoder.encode(0, Changes{offsets, steps}, base, sum, made, of_changes),
               StorageError);
  std::swap(offsets[0], offsets[1]);
  offsets.back() += 1;  // between two items
  EXPECT_THROW(encoder.encode(0, Changes{offsets, steps}, base, sum, made, of_changes),
               StorageError);
  offsets.back() = size;
  EXPECT_THROW(encoder.encode(0, Changes{offsets, steps}, base, sum, made, of_changes),
               StorageError);
}

TEST(DeltaPatch, ThreadsMakeTheSameBytes) {
  const uint64_t size = 3 * kChunkBytes;
  const Version base(random_bytes(size, 1));
  const Version next(stepped(base.data, 0.01, 2));
  const DeltaLayout layout = all(size, Item::kFloat16);
  const Data patch = patch_of(layout, base, next, 4);
  EXPECT_EQ(patch, patch_of(layout, base, next, 1));
  EXPECT_EQ(applied(layout, patch, base, 4), next.data);
  EXPECT_EQ(applied(layout, patch, base, 4), next.data);  // again: the same
}

TEST(DeltaPatch, ChainsVersionsByContent) {
  const DeltaLayout layout = all(4096, Item::kFloat16);
  const Version first(random_bytes(4096, 1));
  const Version second(stepped(first.data, 0.1, 2));
  const Version third(stepped(second.data, 0.1, 3));
  const Data one = patch_of(layout, first, second);
  const Data two = patch_of(layout, second, third);
  ConstBytes at = one;
  const PatchHeader header = PatchHeader::take(at);
  at = two;
  EXPECT_EQ(header.result_hash, PatchHeader::take(at).base_hash);
  EXPECT_EQ(header.version, 5U);
  EXPECT_EQ(applied(layout, two, Version(applied(layout, one, first))), third.data);
  EXPECT_NE(version_hash(kManifest, first.checksums), version_hash({7, 8}, first.checksums));
  EXPECT_NE(version_hash(kManifest, first.checksums), version_hash(kManifest, second.checksums));
}

template <class Error, class Action>
std::string text_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(DeltaPatch, RefusesAnotherBaseByName) {
  const DeltaLayout layout = all(4096, Item::kFloat16);
  const Version base(random_bytes(4096, 1));
  const Version other(random_bytes(4096, 7));
  const Data patch = patch_of(layout, base, Version(stepped(base.data, 0.1, 2)));
  EXPECT_NE(text_of<StorageError>([&] {
              applied(layout, patch, other);
            }).find("the patch from version 4 to 5 starts from"),
            std::string::npos);
  Data out(4096);
  EXPECT_NE(text_of<StorageError>([&] {
              apply_patch(layout, patch, {7, 8}, base.view(), out, 1);
            }).find("is for manifest"),
            std::string::npos);
  // A base whose bytes are not what its checksums say.
  Version damaged = base;
  damaged.data[100] ^= std::byte{1};
  EXPECT_NE(text_of<ChecksumMismatch>([&] {
              applied(layout, patch, damaged);
            }).find("the base is not what its checksum says"),
            std::string::npos);
  // In place, or into too little.
  Version same = base;
  EXPECT_THROW(apply_patch(layout, patch, kManifest, same.view(), same.data, 1), StorageError);
  EXPECT_THROW(apply_patch(layout, patch, kManifest, base.view(), Bytes(out).first(64), 1),
               StorageError);
}

TEST(DeltaPatch, NamesWhatIsDamaged) {
  const DeltaLayout layout = all(4096, Item::kFloat16);
  const Version base(random_bytes(4096, 1));
  const Data patch = patch_of(layout, base, Version(stepped(base.data, 0.1, 2)));
  for (size_t length = 0; length < patch.size(); ++length) {
    EXPECT_THROW(applied(layout, Data(patch.begin(), patch.begin() + length), base), StorageError);
  }
  Data longer = patch;
  longer.push_back({});
  EXPECT_THROW(applied(layout, longer, base), StorageError);
  Data header = patch;
  header[9] ^= std::byte{1};
  EXPECT_THROW(applied(layout, header, base), ChecksumMismatch);
}

// Patches with bytes flipped, moved, cut and doubled: an error, or exactly the result. How many is
// PSRL_FUZZ_INPUTS. The blocks stand in allocations of their own size, for sanitizers.
TEST(DeltaPatch, SurvivesAnyBytes) {
  const char* wanted = std::getenv("PSRL_FUZZ_INPUTS");
  const int num_inputs = wanted != nullptr ? std::atoi(wanted) : 5000;
  Random random(2024);
  const DeltaLayout layout({{256, Item::kByte}, {1024, Item::kFloat32}, {4096, Item::kFloat16}});
  const Data base = random_bytes(4096, 1);
  const uint32_t sum = chunk_checksum(base, 0);
  int exact = 0;
  Data out(4096);
  for (int i = 0; i < num_inputs; ++i) {
    const double share = std::array{0.002, 0.05, 0.5}[random() % 3];
    const Data next = stepped(base, share, random());
    Data coded;
    BlockEncoder(layout).encode(0, base, next, sum, chunk_checksum(next, 0), coded);
    for (uint64_t edits = random() % 4; edits > 0; --edits) {
      const size_t at = random() % 3 == 0 ? random() % coded.size()
                                          : random() % std::min<size_t>(coded.size(), 100);
      switch (random() % 4) {
        case 0:
          coded[at] ^= std::byte{1} << random() % 8;
          break;
        case 1:
          coded[at] = static_cast<std::byte>(random());
          break;
        case 2:
          coded.erase(coded.begin() + static_cast<ptrdiff_t>(at));
          break;
        default:
          coded.insert(coded.begin() + static_cast<ptrdiff_t>(at), coded[random() % coded.size()]);
      }
      if (coded.size() >= sizeof(BlockHeader)) {  // mostly let the body through to the decoder
        BlockHeader header;
        std::memcpy(&header, coded.data(), sizeof(header));
        header.index = 0;
        header.base_checksum = sum;
        header.body_bytes = static_cast<uint32_t>(coded.size() - sizeof(header));
        if (random() % 8 != 0) std::memcpy(coded.data(), &header, sizeof(header));
      }
    }
    coded.shrink_to_fit();
    try {
      ConstBytes in = coded;
      const Block block = Block::take(in);
      EXPECT_EQ(apply_block(layout, block, base, sum, out), block.header.result_checksum);
      EXPECT_EQ(out, next);
      ++exact;
    } catch (const StorageError&) {
    }
  }
  EXPECT_GT(exact, num_inputs / 5);
  EXPECT_LT(exact, num_inputs / 2);
}

}  // namespace
}  // namespace psrl::weights
