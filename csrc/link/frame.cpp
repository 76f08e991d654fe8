#include "link/frame.h"

#include "base/errors.h"
#include "link/wire.h"

namespace psrl::link {
namespace {

constexpr uint16_t kFrameMagic = 0x4c50;  // "PL": tells a stream that lost its place at once

[[noreturn]] void malformed(const std::string& what) {
  throw LinkError("malformed frame: " + what);
}

// The least and the most bytes of a body.
struct Limits {
  uint32_t least, most;
  bool payload;
};

Limits limits_of(FrameType type) {
  switch (type) {
    case FrameType::kPut:
      return {16, kMaxBodyBytes, true};
    case FrameType::kPutEnd:
      return {16, 16 + kMaxNoticeBytes, false};
    case FrameType::kPull:
      return {16, kMaxBodyBytes, false};
    case FrameType::kPullData:
      return {8, 8, true};
    case FrameType::kNotice:
      return {0, kMaxNoticeBytes, false};
    case FrameType::kAck:
      return {0, kMaxReasonBytes, false};
    case FrameType::kCancel:
    case FrameType::kGoodbye:
      return {0, 0, false};
  }
  malformed("unknown type " + std::to_string(static_cast<int>(type)));
}

std::string with_header(FrameType type, uint64_t id, Status status, std::string_view body,
                        uint64_t payload) {
  std::string out =
      FrameHeader{type, status, static_cast<uint32_t>(body.size()), id, payload}.encode();
  return out += body;
}

}  // namespace

std::string FrameHeader::encode() const {
  std::string out;
  out.reserve(kFrameHeaderBytes + body);
  put<uint16_t>(out, kFrameMagic);
  put<uint8_t>(out, static_cast<uint8_t>(type));
  put<uint8_t>(out, static_cast<uint8_t>(status));
  put<uint32_t>(out, body);
  put<uint64_t>(out, id);
  put<uint64_t>(out, payload);
  return out;
}

FrameHeader FrameHeader::decode(std::string_view encoded) {
  if (encoded.size() != kFrameHeaderBytes) malformed("a cut header");
  if (get<uint16_t>(encoded, 0) != kFrameMagic) malformed("no frame begins here");
  FrameHeader header;
  header.type = static_cast<FrameType>(get<uint8_t>(encoded, 2));
  const auto status = get<uint8_t>(encoded, 3);
  header.body = get<uint32_t>(encoded, 4);
  header.id = get<uint64_t>(encoded, 8);
  header.payload = get<uint64_t>(encoded, 16);
  const Limits limits = limits_of(header.type);
  if (header.body < limits.least || header.body > limits.most) {
    malformed("a body of " + std::to_string(header.body) + " bytes");
  }
  if (header.payload > (limits.payload ? kMaxPayloadBytes : 0)) {
    malformed("a payload of " + std::to_string(header.payload) + " bytes");
  }
  if (status > (header.type == FrameType::kAck ? static_cast<uint8_t>(Status::kClosed) : 0)) {
    malformed("status " + std::to_string(status));
  }
  header.status = static_cast<Status>(status);
  return header;
}

WindowRanges WindowRanges::decode(const FrameHeader& header, std::string_view body) {
  if (body.size() != header.body || body.size() < 16 || (body.size() - 16) % 16 != 0 ||
      body.size() > kMaxBodyBytes) {
    malformed("a list of ranges that is cut");
  }
  WindowRanges result;
  result.window = get<uint64_t>(body, 0);
  result.generation = get<uint64_t>(body, 8);
  result.ranges.reserve((body.size() - 16) / 16);
  for (size_t at = 16; at < body.size(); at += 16) {
    const Range range{get<uint64_t>(body, at), get<uint64_t>(body, at + 8)};
    if (range.length == 0 || range.offset + range.length < range.offset ||
        result.total + range.length < result.total) {
      malformed("a range of " + std::to_string(range.length) + " bytes");
    }
    result.total += range.length;
    result.ranges.push_back(range);
  }
  if (header.type == FrameType::kPut && result.total != header.payload) {
    malformed("ranges of " + std::to_string(result.total) + " bytes for a payload of " +
              std::to_string(header.payload));
  }
  return result;
}

PutEnd PutEnd::decode(const FrameHeader& header, std::string_view body) {
  if (body.size() != header.body || body.size() < 16) malformed("a put's end that is cut");
  return {get<uint64_t>(body, 0), get<uint64_t>(body, 8), body.substr(16)};
}

uint64_t decode_position(const FrameHeader& header, std::string_view body) {
  if (body.size() != header.body || body.size() != 8) malformed("a position that is cut");
  return get<uint64_t>(body, 0);
}

std::string encode_ranges(FrameType type, uint64_t id, uint64_t window, uint64_t generation,
                          const std::vector<Range>& ranges) {
  uint64_t total = 0;
  for (const Range& range : ranges) total += range.length;
  std::string out = FrameHeader{type, Status::kOk, static_cast<uint32_t>(16 + 16 * ranges.size()),
                                id, type == FrameType::kPut ? total : 0}
                        .encode();
  put<uint64_t>(out, window);
  put<uint64_t>(out, generation);
  for (const Range& range : ranges) {
    put<uint64_t>(out, range.offset);
    put<uint64_t>(out, range.length);
  }
  return out;
}

std::string encode_put_end(uint64_t id, uint64_t window, uint64_t generation,
                           std::string_view notice) {
  std::string body;
  put<uint64_t>(body, window);
  put<uint64_t>(body, generation);
  return with_header(FrameType::kPutEnd, id, Status::kOk, body += notice, 0);
}

std::string encode_pull_data(uint64_t id, uint64_t position, uint64_t payload) {
  std::string body;
  put<uint64_t>(body, position);
  return with_header(FrameType::kPullData, id, Status::kOk, body, payload);
}

std::string encode_notice(uint64_t id, std::string_view notice) {
  return with_header(FrameType::kNotice, id, Status::kOk, notice, 0);
}

std::string encode_ack(uint64_t id, Status status, std::string_view reason) {
  return with_header(FrameType::kAck, id, status, reason.substr(0, kMaxReasonBytes), 0);
}

std::string encode_empty(FrameType type, uint64_t id) {
  return with_header(type, id, Status::kOk, {}, 0);
}

}  // namespace psrl::link
