// The entropy code of a patch: changes, each a gap (unchanged items before it) and a step in ulps.
//
// A change is one symbol and raw bits. The symbol joins the gap's bucket (four to an octave) with
// how far the step goes: 1, 2, 3 or more ulps; a long step has a second symbol. Both come from
// prefix codes made for these very changes. Gaps are close to geometric and nine steps in ten are
// short, so the joint code stays within a few hundredths of a bit of the entropy.
//
//   changes: varint count | lengths of the step codes | lengths of the long-step codes |
//            4 x varint bytes of a stream | 4 streams
//
// Change i stands in stream i % 4, so that four are decoded at once. Streams are read a word at a
// time and ahead of themselves: kPadding bytes must follow the last one. Reading is total:
// StorageError, or changes whose positions ascend within the items.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "base/bytes.h"

namespace psrl::weights::delta {

inline constexpr size_t kStreams = 4;
inline constexpr size_t kPadding = 16;
inline constexpr uint32_t kMaxItems = uint32_t{1} << 22;  // gaps are smaller

// A value at least 2^mantissa, cut into a bucket and raw bits: its top bits and those below.
template <unsigned mantissa>
struct Bucket {
  static constexpr uint32_t kBias = 1U << mantissa;
  static uint32_t of(uint32_t value) {
    const unsigned e = static_cast<unsigned>(std::bit_width(value)) - 1 - mantissa;
    return (e << mantissa) + (value >> e) - kBias;
  }
  static unsigned raw_bits(uint32_t bucket) { return bucket >> mantissa; }
  static uint32_t first(uint32_t bucket) {
    return (kBias + (bucket & (kBias - 1))) << raw_bits(bucket);
  }
};
using GapBucket = Bucket<2>;   // of gap + 4
using LongBucket = Bucket<1>;  // of |step| - 2, for |step| >= 4

inline constexpr uint32_t kStepClasses = 4;  // |step| 1, 2, 3 and more
inline constexpr uint32_t kGapBuckets = 81;
inline constexpr uint32_t kSymbols = kStepClasses * kGapBuckets;
inline constexpr uint32_t kLongSymbols = 60;
inline constexpr unsigned kMaxLength = 11;
inline constexpr unsigned kMaxLongLength = 8;

class ChangeEncoder {
 public:
  // Forgets all changes, but keeps the memory.
  void reset();
  // Takes the next changes: places are above all before, steps are not 0.
  void add(std::span<const uint32_t> places, std::span<const int32_t> steps);
  size_t count() const { return count_; }
  // Appends the changes, without the padding, if that takes fewer than `limit` bytes; else false.
  bool finish(std::vector<std::byte>& out, size_t limit);

 private:
  std::vector<uint32_t> records_;  // symbol, and above it sign and raw bits of the gap
  std::vector<uint32_t> long_;     // |step| - 2 of the long steps, in order
  std::array<uint32_t, kSymbols> uses_{};
  std::vector<std::byte> streams_;
  size_t count_ = 0;
  size_t num_long_ = 0;
  uint32_t next_ = 0;  // the item after the last change
};

// The number that a bit pattern stands for (see Item), and back: the map is its own inverse.
template <class Word>
Word flipped(Word word) {
  if constexpr (sizeof(Word) == 1) return word;
  using Signed = std::make_signed_t<Word>;
  const auto sign = static_cast<Signed>(static_cast<Signed>(word) >> (8 * sizeof(Word) - 1));
  return static_cast<Word>(word ^ (static_cast<Word>(sign) >> 1));
}

template <class Word>
Word load(const std::byte* at, size_t index = 0) {
  Word word;
  std::memcpy(&word, at + index * sizeof(Word), sizeof(Word));
  return word;
}

template <class Word>
void apply_step(std::byte* at, int32_t step) {
  const auto number = static_cast<Word>(flipped(load<Word>(at)) + static_cast<Word>(step));
  const Word word = flipped(number);
  std::memcpy(at, &word, sizeof(Word));
}

// A part of the items that can be changed: item i stands at `items + i * size`, for i below `end`.
struct Window {
  std::byte* items = nullptr;
  uint64_t end = 0;
};

class ChangeDecoder {
 public:
  // Reads the changes' description from the front of `in` and takes description and streams off
  // it; what is left must be at least kPadding bytes. StorageError if it is malformed.
  explicit ChangeDecoder(ConstBytes& in);

  // Applies the changes to `num_items` items of type Word. `move_to(place)` gives the window that
  // holds an item at or behind the end of the last one.
  template <class Word, class MoveTo>
  void apply(uint64_t num_items, MoveTo move_to) const;

 private:
  struct Entry {
    uint32_t base = 0;  // of the gap or long step
    uint8_t length = 0;
    uint8_t raw = 0;
    uint8_t total = 0;  // of both
    uint8_t reach = 0;
  };
  struct Change {
    uint32_t gap;
    int32_t step;
  };
  // Streams are told by the bit that comes next, counted from `origin_`.
  uint64_t word_at(uint64_t bit) const { return load<uint64_t>(origin_ + bit / 8) >> (bit % 8); }
  Change read(uint64_t& bit) const;
  uint32_t read_long(uint64_t& bit) const;
  void require_inside(uint64_t bit) const {
    if (bit > last_bit_) throw_malformed("a stream is too short");
  }
  void require_consumed(const std::array<uint64_t, kStreams>& bits) const;
  [[noreturn]] static void throw_malformed(const char* what);

  uint32_t count_ = 0;
  const std::byte* origin_ = nullptr;
  uint64_t last_bit_ = 0;  // up to here a word can be read
  std::array<uint64_t, kStreams> begins_{};
  std::array<uint64_t, kStreams> ends_{};
  std::array<Entry, 1U << kMaxLength> table_;
  std::array<Entry, 1U << kMaxLongLength> long_table_;
};

inline ChangeDecoder::Change ChangeDecoder::read(uint64_t& bit) const {
  const uint64_t word = word_at(bit);
  const Entry entry = table_[word & ((1U << kMaxLength) - 1)];
  const auto raw = static_cast<uint32_t>(word >> entry.length) & ((1U << entry.raw) - 1);
  bit += entry.total;
  uint32_t size = entry.reach;
  if (size == kStepClasses) [[unlikely]]
    size = read_long(bit);
  const uint32_t negative = 0 - (raw & 1);
  return {entry.base + (raw >> 1), static_cast<int32_t>((size ^ negative) - negative)};
}

template <class Word, class MoveTo>
void ChangeDecoder::apply(uint64_t num_items, MoveTo move_to) const {
  Window window;
  const auto change = [&](uint64_t place, int32_t step) {
    if (place >= window.end) window = move_to(place);
    apply_step<Word>(window.items + place * sizeof(Word), step);
  };
  auto [a, b, c, d] = begins_;
  uint64_t next = 0;
  uint32_t left = count_;
  for (; left >= kStreams; left -= kStreams) {
    require_inside(std::max({a, b, c, d}));
    const Change first = read(a);
    const Change second = read(b);
    const Change third = read(c);
    const Change fourth = read(d);
    const uint64_t w = next + first.gap;
    const uint64_t x = w + 1 + second.gap;
    const uint64_t y = x + 1 + third.gap;
    const uint64_t z = y + 1 + fourth.gap;
    if (z >= window.end) [[unlikely]] {
      if (z >= num_items) throw_malformed("a change is outside of the block");
      change(w, first.step);
      change(x, second.step);
      change(y, third.step);
      change(z, fourth.step);
    } else {
      apply_step<Word>(window.items + w * sizeof(Word), first.step);
      apply_step<Word>(window.items + x * sizeof(Word), second.step);
      apply_step<Word>(window.items + y * sizeof(Word), third.step);
      apply_step<Word>(window.items + z * sizeof(Word), fourth.step);
    }
    next = z + 1;
  }
  std::array<uint64_t, kStreams> bits{a, b, c, d};
  for (uint32_t i = 0; i < left; ++i) {
    require_inside(bits[i]);
    const Change last = read(bits[i]);
    next += last.gap;
    if (next >= num_items) throw_malformed("a change is outside of the block");
    change(next, last.step);
    ++next;
  }
  require_consumed(bits);
}

void put_varint(std::vector<std::byte>& out, uint64_t value);
// Takes a number below 2^32 off the front of `in`.
uint32_t take_varint(ConstBytes& in);

// Lengths of the best prefix code for `uses` with no length over `limit`; 0 for what is unused.
void code_lengths(std::span<const uint32_t> uses, unsigned limit, std::span<uint8_t> lengths);

}  // namespace psrl::weights::delta
