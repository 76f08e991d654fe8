// Frames and adverts: what comes back is what was said, and nothing that is malformed gets through.
#include "link/frame.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "base/errors.h"

namespace psrl::link {
namespace {

FrameHeader header_of(const std::string& frame) {
  return FrameHeader::decode(std::string_view(frame).substr(0, kFrameHeaderBytes));
}

std::string_view body_of(const std::string& frame) {
  return std::string_view(frame).substr(kFrameHeaderBytes);
}

// Decodes a whole frame as a connection does; a bad one raises LinkError.
void decode(std::string_view frame) {
  if (frame.size() < kFrameHeaderBytes) return;
  const FrameHeader header = FrameHeader::decode(frame.substr(0, kFrameHeaderBytes));
  ASSERT_LE(header.body, kMaxBodyBytes);
  ASSERT_LE(header.payload, kMaxPayloadBytes);
  const std::string_view body = frame.substr(kFrameHeaderBytes, header.body);
  if (body.size() < header.body) return;
  switch (header.type) {
    case FrameType::kPut:
    case FrameType::kPull: {
      const WindowRanges put = WindowRanges::decode(header, body);
      uint64_t total = 0;
      for (const Range& range : put.ranges) {
        ASSERT_GE(range.offset + range.length, range.offset);
        total += range.length;
      }
      ASSERT_EQ(total, put.total);
      if (header.type == FrameType::kPut) {
        ASSERT_EQ(total, header.payload);
      }
      break;
    }
    case FrameType::kPutEnd:
      ASSERT_LE(PutEnd::decode(header, body).notice.size(), kMaxNoticeBytes);
      break;
    case FrameType::kPullData:
      decode_position(header, body);
      break;
    default:
      break;
  }
}

std::vector<std::string> good_frames() {
  return {encode_ranges(FrameType::kPut, 7, 1, 2, {{0, 5}, {100, 3}}),
          encode_ranges(FrameType::kPull, 8, 1, 2, {{0, 1ull << 40}}),
          encode_put_end(7, 1, 2, "notice"),
          encode_pull_data(8, 1ull << 39, 1 << 20),
          encode_notice(9, "n"),
          encode_ack(7, Status::kStale, "over"),
          encode_empty(FrameType::kCancel, 7),
          encode_empty(FrameType::kGoodbye, 0)};
}

TEST(LinkFrame, RoundTrip) {
  const std::string put = encode_ranges(FrameType::kPut, 7, 1, 2, {{0, 5}, {100, 3}});
  EXPECT_EQ(header_of(put).type, FrameType::kPut);
  EXPECT_EQ(header_of(put).id, 7u);
  EXPECT_EQ(header_of(put).payload, 8u);
  const WindowRanges ranges = WindowRanges::decode(header_of(put), body_of(put));
  EXPECT_EQ(ranges.window, 1u);
  EXPECT_EQ(ranges.generation, 2u);
  EXPECT_EQ(ranges.total, 8u);
  EXPECT_EQ(ranges.ranges, (std::vector<Range>{{0, 5}, {100, 3}}));

  const std::string end = encode_put_end(7, 1, ~0ull, std::string("no\0tice", 7));
  EXPECT_EQ(PutEnd::decode(header_of(end), body_of(end)).generation, ~0ull);
  EXPECT_EQ(PutEnd::decode(header_of(end), body_of(end)).notice, std::string("no\0tice", 7));

  const std::string data = encode_pull_data(8, 1ull << 39, 1 << 20);
  EXPECT_EQ(decode_position(header_of(data), body_of(data)), 1ull << 39);
  EXPECT_EQ(header_of(data).payload, 1u << 20);

  const std::string ack = encode_ack(7, Status::kRefused, std::string(1000, 'x'));
  EXPECT_EQ(header_of(ack).status, Status::kRefused);
  EXPECT_EQ(header_of(ack).body, kMaxReasonBytes);
}

TEST(LinkFrame, LimitsHold) {
  FrameHeader header{FrameType::kPut, Status::kOk, 32, 1, kMaxPayloadBytes};
  EXPECT_NO_THROW(FrameHeader::decode(header.encode()));
  header.payload += 1;
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kPut, Status::kOk, kMaxBodyBytes + 1, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kNotice, Status::kOk, kMaxNoticeBytes + 1, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kNotice, Status::kOk, 1, 1, 1};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kGoodbye, Status::kOk, 1, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {static_cast<FrameType>(0), Status::kOk, 0, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {static_cast<FrameType>(9), Status::kOk, 0, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kAck, static_cast<Status>(6), 0, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
  header = {FrameType::kPut, Status::kStale, 32, 1, 0};
  EXPECT_THROW(FrameHeader::decode(header.encode()), LinkError);
}

TEST(LinkFrame, RangesThatLieAreRefused) {
  const auto decode_put = [](const std::vector<Range>& ranges, uint64_t payload) {
    std::string frame = encode_ranges(FrameType::kPull, 1, 1, 1, ranges);
    FrameHeader header = header_of(frame);
    header.type = FrameType::kPut;
    header.payload = payload;
    return WindowRanges::decode(header, body_of(frame));
  };
  EXPECT_NO_THROW(decode_put({{5, 3}}, 3));
  EXPECT_THROW(decode_put({{5, 3}}, 4), LinkError);
  EXPECT_THROW(decode_put({{5, 0}}, 0), LinkError);
  EXPECT_THROW(decode_put({{~0ull, 2}}, 2), LinkError);
  EXPECT_THROW(decode_put({{0, 1ull << 63}, {0, 1ull << 63}}, 0), LinkError);
}

// Frames from outside: whatever the bytes are, decoding gives a checked frame or LinkError. The
// long proof sets PSRL_FUZZ_INPUTS.
TEST(LinkFrame, MutatedFramesNeverCrash) {
  const char* const wanted = std::getenv("PSRL_FUZZ_INPUTS");
  const long inputs = wanted == nullptr ? 100'000 : std::atol(wanted);
  std::mt19937_64 random(7);
  const auto frames = good_frames();
  long refused = 0;
  for (long round = 0; round < inputs; ++round) {
    std::string frame = frames[random() % frames.size()];
    for (uint64_t left = random() % 4; left > 0; --left) {
      const size_t at = random() % frame.size();
      switch (random() % 3) {
        case 0:
          frame[at] = static_cast<char>(random());
          break;
        case 1:
          frame[at] = static_cast<char>(frame[at] ^ 1 << random() % 8);
          break;
        default:
          frame.resize(at + 1);
      }
    }
    try {
      decode(frame);
    } catch (const LinkError&) {
      ++refused;
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(refused, inputs / 20);
}

TEST(LinkAdvert, RoundTrip) {
  Advert advert{3, 1ull << 62, 1 << 20, WindowAccess::kPull, MemoryKind::kHost, 1, "key\0x"};
  const Advert back = Advert::decode(advert.encode());
  EXPECT_EQ(back.window, advert.window);
  EXPECT_EQ(back.generation, advert.generation);
  EXPECT_EQ(back.length, advert.length);
  EXPECT_EQ(back.access, advert.access);
  EXPECT_EQ(back.memory_kind, advert.memory_kind);
  EXPECT_EQ(back.numa_node, advert.numa_node);
  EXPECT_EQ(back.key, advert.key);
  advert.numa_node = -1;
  EXPECT_EQ(Advert::decode(advert.encode()).numa_node, -1);
}

TEST(LinkAdvert, MalformedOnesAreRefused) {
  const std::string good = Advert{3, 4, 5, WindowAccess::kPut, MemoryKind::kHost, 0, "k"}.encode();
  EXPECT_NO_THROW(Advert::decode(good));
  for (size_t cut = 0; cut < good.size(); ++cut) {
    EXPECT_THROW(Advert::decode(good.substr(0, cut)), LinkError) << cut;
  }
  EXPECT_THROW(Advert::decode(good + "x"), LinkError);
  EXPECT_THROW(Advert::decode(std::string(kMaxAdvertBytes + 1, '\0')), LinkError);
  for (const size_t at : {0, 2, 3}) {  // version, access, memory kind
    std::string bad = good;
    bad[at] = 77;
    EXPECT_THROW(Advert::decode(bad), LinkError) << at;
  }
  Advert large{
      3, 4, 5, WindowAccess::kPut, MemoryKind::kHost, 0, std::string(kMaxAdvertBytes, 'k')};
  EXPECT_THROW(large.encode(), LinkError);
}

}  // namespace
}  // namespace psrl::link
