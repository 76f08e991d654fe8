// Frames of the tcp transport: what follows the handshake on a connection, in both directions.
//
// A frame is a header of fixed size, a body of at most kMaxBodyBytes, and for data a payload of at
// most kMaxPayloadBytes that goes from memory to memory. Decoding is pure: every length is checked,
// nothing is taken on trust, and what does not fit raises LinkError (which costs the peer its
// connection).
//
//     frame      body                                  payload
//     kPut       window, generation, ranges            the ranges' bytes, in order
//     kPutEnd    window, generation, notice            -        all of put `id` was sent
//     kPull      window, generation, ranges            -        answered by kPullData, then kAck
//     kPullData  position                              bytes of pull `id` from that position on
//     kNotice    the notice                            -
//     kAck       the reason, if it is not kOk          -        the end of put, pull or notice `id`
//     kCancel    -                                     -        the sender gave `id` up
//     kGoodbye   -                                     -        no new operations from this side
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "link/link.h"

namespace psrl::link {

enum class FrameType : uint8_t {
  kPut = 1,
  kPutEnd,
  kPull,
  kPullData,
  kNotice,
  kAck,
  kCancel,
  kGoodbye,
};

struct Range {
  uint64_t offset = 0;
  uint64_t length = 0;
  bool operator==(const Range&) const = default;
};

inline constexpr size_t kFrameHeaderBytes = 24;
inline constexpr size_t kMaxRanges = 512;  // of one frame
inline constexpr size_t kMaxReasonBytes = 200;
inline constexpr size_t kMaxBodyBytes = 16 + 16 * kMaxRanges;
inline constexpr uint64_t kMaxPayloadBytes = 4ull << 20;

struct FrameHeader {
  FrameType type = FrameType::kGoodbye;
  Status status = Status::kOk;  // kAck
  uint32_t body = 0;            // bytes
  uint64_t id = 0;
  uint64_t payload = 0;  // bytes

  std::string encode() const;
  // `encoded` has exactly kFrameHeaderBytes.
  static FrameHeader decode(std::string_view encoded);
};

// The body of kPut and kPull; kPutEnd's ends after the generation and goes on with the notice.
struct WindowRanges {
  uint64_t window = 0;
  uint64_t generation = 0;
  std::vector<Range> ranges;
  uint64_t total = 0;  // bytes of all ranges

  // Checks also that a put's payload is as long as its ranges.
  static WindowRanges decode(const FrameHeader& header, std::string_view body);
};

struct PutEnd {
  uint64_t window = 0;
  uint64_t generation = 0;
  std::string_view notice;  // into the body

  static PutEnd decode(const FrameHeader& header, std::string_view body);
};

// The body of kPullData.
uint64_t decode_position(const FrameHeader& header, std::string_view body);

// Header and body, without the payload.
std::string encode_ranges(FrameType type, uint64_t id, uint64_t window, uint64_t generation,
                          const std::vector<Range>& ranges);
std::string encode_put_end(uint64_t id, uint64_t window, uint64_t generation,
                           std::string_view notice);
std::string encode_pull_data(uint64_t id, uint64_t position, uint64_t payload);
std::string encode_notice(uint64_t id, std::string_view notice);
std::string encode_ack(uint64_t id, Status status, std::string_view reason);
std::string encode_empty(FrameType type, uint64_t id);

}  // namespace psrl::link
