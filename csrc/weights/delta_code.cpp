#include "weights/delta_code.h"

#include <string>

#include "base/errors.h"

namespace psrl::weights::delta {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw StorageError("delta: a malformed patch: " + what);
}

// Lengths as nibbles: 0 to 11 are lengths; the others say that something is repeated.
constexpr unsigned kZeros = 12;      // next nibble + 2 times 0
constexpr unsigned kManyZeros = 13;  // next two nibbles + 18 times 0
constexpr unsigned kSame = 14;       // next nibble + 3 times the length before

size_t run_length(std::span<const uint8_t> lengths, size_t from, size_t most) {
  size_t n = 1;
  while (n < most && from + n < lengths.size() && lengths[from + n] == lengths[from]) ++n;
  return n;
}

void put_lengths(std::vector<std::byte>& out, std::span<const uint8_t> lengths) {
  std::vector<unsigned> nibbles;
  for (size_t i = 0; i < lengths.size();) {
    const size_t zeros = lengths[i] == 0 ? run_length(lengths, i, 273) : 0;
    const bool follows = i > 0 && lengths[i] == lengths[i - 1];
    const size_t same = follows && zeros == 0 ? run_length(lengths, i, 18) : 0;
    if (zeros >= 18) {
      const auto more = static_cast<unsigned>(zeros - 18);
      nibbles.insert(nibbles.end(), {kManyZeros, more & 15, more >> 4});
      i += zeros;
    } else if (zeros >= 2) {
      nibbles.insert(nibbles.end(), {kZeros, static_cast<unsigned>(zeros - 2)});
      i += zeros;
    } else if (same >= 3) {
      nibbles.insert(nibbles.end(), {kSame, static_cast<unsigned>(same - 3)});
      i += same;
    } else {
      nibbles.push_back(lengths[i++]);
    }
  }
  if (nibbles.size() % 2 != 0) nibbles.push_back(0);
  for (size_t i = 0; i < nibbles.size(); i += 2) {
    out.push_back(static_cast<std::byte>(nibbles[i] | nibbles[i + 1] << 4));
  }
}

void take_lengths(ConstBytes& in, unsigned limit, std::span<uint8_t> lengths) {
  size_t at = 0;
  const auto nibble = [&] {
    if (at / 2 >= in.size()) malformed("the code lengths end early");
    const auto value = static_cast<unsigned>(in[at / 2]) >> (at % 2 * 4) & 15;
    ++at;
    return value;
  };
  uint64_t room = uint64_t{1} << limit;  // of the code space
  for (size_t i = 0; i < lengths.size();) {
    const unsigned value = nibble();
    size_t times = 1;
    uint8_t length = 0;
    if (value == kZeros) {
      times = nibble() + 2;
    } else if (value == kManyZeros) {
      const unsigned low = nibble();
      times = (low | nibble() << 4) + 18;
    } else if (value == kSame) {
      if (i == 0) malformed("a repeated code length is the first");
      length = lengths[i - 1];
      times = nibble() + 3;
    } else {
      if (value > limit) malformed("a code is too long");
      length = static_cast<uint8_t>(value);
    }
    if (times > lengths.size() - i) malformed("too many code lengths");
    const uint64_t taken = length == 0 ? 0 : times << (limit - length);
    if (taken > room) malformed("the codes overlap");
    room -= taken;
    for (; times > 0; --times) lengths[i++] = length;
  }
  in = in.subspan((at + 1) / 2);
}

// Canonical codes, first bit lowest. Calls `each(symbol, code)` for the symbols in use.
template <class Each>
void assign_codes(std::span<const uint8_t> lengths, unsigned limit, Each each) {
  uint32_t code = 0;  // as if `limit` bits long, first bit highest
  for (unsigned length = 1; length <= limit; ++length) {
    for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
      if (lengths[symbol] != length) continue;
      uint32_t reversed = 0;
      for (unsigned bit = 0; bit < limit; ++bit) reversed |= (code >> bit & 1) << (limit - 1 - bit);
      each(static_cast<uint32_t>(symbol), reversed);
      code += 1U << (limit - length);
    }
  }
}

struct Code {
  uint32_t bits = 0;
  uint16_t length = 0;
  uint16_t raw = 0;
};

class BitWriter {
 public:
  explicit BitWriter(std::byte* at) : begin_(at), at_(at) {}
  void put(uint64_t bits, unsigned count) {  // at most 56
    word_ |= bits << held_;
    held_ += count;
    std::memcpy(at_, &word_, sizeof(word_));
    at_ += held_ >> 3;
    word_ >>= held_ & ~7U;
    held_ &= 7;
  }
  ConstBytes finish() const { return {begin_, at_ + (held_ > 0 ? 1 : 0)}; }

 private:
  std::byte* begin_;
  std::byte* at_;
  uint64_t word_ = 0;
  unsigned held_ = 0;
};

constexpr unsigned kSymbolBits = 9;
constexpr uint32_t kSymbolMask = (1U << kSymbolBits) - 1;
static_assert(kSymbols <= kSymbolMask);
constexpr uint32_t kFirstLong = (kStepClasses - 1) * kGapBuckets;

uint32_t size_of(int32_t step) {
  const uint32_t negative = 0 - (static_cast<uint32_t>(step) >> 31);
  return (static_cast<uint32_t>(step) ^ negative) - negative;
}

// Turns gaps into records, without branches, so that compilers make vector code of it: a float's
// exponent and top two fraction bits are the bucket, as gaps have few enough bits to be exact.
[[gnu::always_inline]] inline void make_records(const int32_t* steps, uint32_t* record,
                                                size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t gap = record[i] + GapBucket::kBias;
    const auto exact = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(gap)));
    const uint32_t bucket = (exact >> 21) - ((127 + 2) << 2);
    const uint32_t raw = gap & ~(~0U << (bucket >> 2));
    const uint32_t reach = std::min(size_of(steps[i]), kStepClasses) - 1;
    const uint32_t negative = static_cast<uint32_t>(steps[i]) >> 31;
    record[i] = (reach * kGapBuckets + bucket) | (raw << 1 | negative) << kSymbolBits;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void make_records_avx2(const int32_t* steps, uint32_t* record,
                                                       size_t count) {
  make_records(steps, record, count);
}
#endif

unsigned raw_bits(uint32_t symbol) { return GapBucket::raw_bits(symbol % kGapBuckets) + 1; }

}  // namespace

void code_lengths(std::span<const uint32_t> uses, unsigned limit, std::span<uint8_t> lengths) {
  // Package-merge: level by level, pairs of what the level before holds are merged with the
  // symbols; a symbol's length is the number of levels whose chosen part holds it.
  struct Item {
    uint64_t weight;
    bool symbol;
  };
  std::ranges::fill(lengths, uint8_t{0});
  std::vector<uint32_t> order;
  for (uint32_t symbol = 0; symbol < uses.size(); ++symbol) {
    if (uses[symbol] > 0) order.push_back(symbol);
  }
  if (order.empty()) return;
  if (order.size() == 1) {
    lengths[order[0]] = 1;
    return;
  }
  std::ranges::stable_sort(order, {}, [&](uint32_t symbol) { return uses[symbol]; });
  std::vector<Item> symbols;
  for (const uint32_t symbol : order) symbols.push_back({uses[symbol], true});
  std::vector<std::vector<Item>> levels{symbols};
  while (levels.size() < limit) {
    const std::vector<Item>& last = levels.back();
    std::vector<Item> pairs;
    for (size_t i = 0; i + 1 < last.size(); i += 2) {
      pairs.push_back({last[i].weight + last[i + 1].weight, false});
    }
    std::vector<Item> merged(symbols.size() + pairs.size());
    std::ranges::merge(symbols, pairs, merged.begin(), {}, &Item::weight, &Item::weight);
    levels.push_back(std::move(merged));
  }
  size_t chosen = 2 * order.size() - 2;
  for (size_t level = limit; level-- > 0;) {
    size_t num_symbols = 0;
    for (size_t i = 0; i < chosen; ++i) num_symbols += levels[level][i].symbol ? 1 : 0;
    for (size_t i = 0; i < num_symbols; ++i) ++lengths[order[i]];
    chosen = 2 * (chosen - num_symbols);
  }
}

void put_varint(std::vector<std::byte>& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out.push_back(static_cast<std::byte>(value | 128));
  out.push_back(static_cast<std::byte>(value));
}

uint32_t take_varint(ConstBytes& in) {
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 35; shift += 7) {
    if (in.empty()) malformed("a number ends early");
    const auto byte = static_cast<uint64_t>(in[0]);
    in = in.subspan(1);
    value |= (byte & 127) << shift;
    if (byte >= 128) continue;
    if (value >> 32 != 0) break;
    return static_cast<uint32_t>(value);
  }
  malformed("a number is too large");
}

// --- Encoding ------------------------------------------------------------------------------------

void ChangeEncoder::add(std::span<const uint32_t> places, std::span<const int32_t> steps) {
  const size_t count = places.size();
  if (records_.size() < count_ + count) records_.resize(2 * (count_ + count));
  if (long_.size() < num_long_ + count + 1) long_.resize(2 * (num_long_ + count + 1));
  uint32_t* const record = records_.data() + count_;
  if (count > 0) record[0] = places[0] - next_;
  for (size_t i = 1; i < count; ++i) record[i] = places[i] - places[i - 1] - 1;
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) {
    make_records_avx2(steps.data(), record, count);
  } else
#endif
    make_records(steps.data(), record, count);

  uint32_t* far = long_.data() + num_long_;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t symbol = record[i] & kSymbolMask;
    ++uses_[symbol];
    *far = size_of(steps[i]) - 2;  // written always, kept if the step is a long one
    far += symbol >= kFirstLong;
  }
  num_long_ = static_cast<size_t>(far - long_.data());
  if (count > 0) next_ = places[count - 1] + 1;
  count_ += count;
}

void ChangeEncoder::reset() {
  uses_.fill(0);
  count_ = 0;
  num_long_ = 0;
  next_ = 0;
}

bool ChangeEncoder::finish(std::vector<std::byte>& out, size_t limit) {
  const std::span<const uint32_t> far(long_.data(), num_long_);
  std::array<uint32_t, kLongSymbols> long_uses{};
  for (const uint32_t value : far) ++long_uses[LongBucket::of(value)];
  std::array<uint8_t, kSymbols> lengths;
  std::array<uint8_t, kLongSymbols> long_lengths;
  code_lengths(uses_, kMaxLength, lengths);
  code_lengths(long_uses, kMaxLongLength, long_lengths);

  uint64_t num_bits = 0;
  std::array<Code, kSymbols> codes;
  assign_codes(lengths, kMaxLength, [&](uint32_t symbol, uint32_t code) {
    codes[symbol] = {code, lengths[symbol], static_cast<uint16_t>(raw_bits(symbol))};
    num_bits += uint64_t{uses_[symbol]} * (codes[symbol].length + codes[symbol].raw);
  });
  std::array<Code, kLongSymbols> long_codes;
  assign_codes(long_lengths, kMaxLongLength, [&](uint32_t symbol, uint32_t code) {
    long_codes[symbol] = {code, long_lengths[symbol],
                          static_cast<uint16_t>(LongBucket::raw_bits(symbol))};
    num_bits += uint64_t{long_uses[symbol]} * (long_codes[symbol].length + long_codes[symbol].raw);
  });
  const size_t num_bytes = num_bits / 8 + 1;
  if (num_bytes >= limit) return false;

  const size_t room = num_bytes + 2 * sizeof(uint64_t);  // of a stream
  if (streams_.size() < kStreams * room) streams_.resize(kStreams * room);
  std::byte* start = streams_.data();
  std::array<BitWriter, kStreams> writers{BitWriter(start), BitWriter(start + room),
                                          BitWriter(start + 2 * room), BitWriter(start + 3 * room)};
  const uint32_t* next_long = far.data();
  const auto write = [&](BitWriter& writer, uint32_t record) {
    const uint32_t symbol = record & kSymbolMask;
    const Code code = codes[symbol];
    writer.put(code.bits | uint64_t{record >> kSymbolBits} << code.length, code.length + code.raw);
    if (symbol < kFirstLong) return;
    const uint32_t value = *next_long++;
    const Code step = long_codes[LongBucket::of(value)];
    const uint64_t raw = value & ((1U << step.raw) - 1);
    writer.put(step.bits | raw << step.length, step.length + step.raw);
  };
  auto [a, b, c, d] = writers;
  size_t i = 0;
  for (; i + kStreams <= count_; i += kStreams) {
    write(a, records_[i]);
    write(b, records_[i + 1]);
    write(c, records_[i + 2]);
    write(d, records_[i + 3]);
  }
  writers = {a, b, c, d};
  for (size_t rest = 0; i + rest < count_; ++rest) write(writers[rest], records_[i + rest]);

  const size_t before = out.size();
  put_varint(out, count_);
  put_lengths(out, lengths);
  put_lengths(out, long_lengths);
  for (const BitWriter& writer : writers) put_varint(out, writer.finish().size());
  for (const BitWriter& writer : writers) {
    const ConstBytes stream = writer.finish();
    out.insert(out.end(), stream.begin(), stream.end());
  }
  if (out.size() - before < limit) return true;
  out.resize(before);
  return false;
}

// --- Decoding ------------------------------------------------------------------------------------

ChangeDecoder::ChangeDecoder(ConstBytes& in) {
  count_ = take_varint(in);
  std::array<uint8_t, kSymbols> lengths;
  take_lengths(in, kMaxLength, lengths);
  std::array<uint8_t, kLongSymbols> long_lengths;
  take_lengths(in, kMaxLongLength, long_lengths);
  std::array<size_t, kStreams> sizes;
  for (size_t& size : sizes) size = take_varint(in);
  origin_ = in.data();
  uint64_t at = 0;
  for (size_t i = 0; i < kStreams; ++i) {
    if (sizes[i] > in.size() - at) throw_malformed("a stream ends early");
    begins_[i] = at * 8;
    at += sizes[i];
    ends_[i] = at * 8;
  }
  if (in.size() - at < kPadding) throw_malformed("the padding is missing");
  last_bit_ = (in.size() - sizeof(uint64_t)) * 8;
  in = in.subspan(at);

  // What no code stands for leads outside of the block.
  table_.fill({.base = kMaxItems, .length = 0, .raw = 0, .total = 0, .reach = 0});
  assign_codes(lengths, kMaxLength, [&](uint32_t symbol, uint32_t code) {
    const uint32_t bucket = symbol % kGapBuckets;
    const unsigned raw = raw_bits(symbol);
    const Entry entry{.base = GapBucket::first(bucket) - GapBucket::kBias,
                      .length = lengths[symbol],
                      .raw = static_cast<uint8_t>(raw),
                      .total = static_cast<uint8_t>(lengths[symbol] + raw),
                      .reach = static_cast<uint8_t>(symbol / kGapBuckets + 1)};
    for (size_t i = code; i < table_.size(); i += size_t{1} << entry.length) table_[i] = entry;
  });
  long_table_.fill({});
  assign_codes(long_lengths, kMaxLongLength, [&](uint32_t symbol, uint32_t code) {
    const unsigned raw = LongBucket::raw_bits(symbol);
    const Entry entry{.base = LongBucket::first(symbol) + 2,
                      .length = long_lengths[symbol],
                      .raw = static_cast<uint8_t>(raw),
                      .total = static_cast<uint8_t>(long_lengths[symbol] + raw),
                      .reach = 0};
    for (size_t i = code; i < long_table_.size(); i += size_t{1} << entry.length) {
      long_table_[i] = entry;
    }
  });
}

uint32_t ChangeDecoder::read_long(uint64_t& bit) const {
  require_inside(bit);
  const uint64_t word = word_at(bit);
  const Entry entry = long_table_[word & ((1U << kMaxLongLength) - 1)];
  if (entry.length == 0) throw_malformed("a step has no code");
  bit += entry.total;
  return entry.base + (static_cast<uint32_t>(word >> entry.length) & ((1U << entry.raw) - 1));
}

void ChangeDecoder::throw_malformed(const char* what) { malformed(what); }

void ChangeDecoder::require_consumed(const std::array<uint64_t, kStreams>& bits) const {
  for (size_t i = 0; i < kStreams; ++i) {
    if ((bits[i] + 7) / 8 * 8 != ends_[i]) throw_malformed("a stream has another length");
  }
}

}  // namespace psrl::weights::delta
