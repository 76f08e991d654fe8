// Frames of the tcp transport, decoded as a connection does and encoded again.
#include "base/errors.h"
#include "fuzz.h"
#include "link/frame.h"

namespace psrl::fuzz {

using namespace link;

std::vector<std::string> seeds() {
  std::vector<Range> many;
  for (uint64_t i = 0; i < 64; ++i) many.push_back({i * 10, 10});
  return {encode_ranges(FrameType::kPut, 7, 1, 2, {{0, 5}, {100, 3}}),
          encode_ranges(FrameType::kPut, 7, 1, 2, many),
          encode_ranges(FrameType::kPull, 8, 1, 2, {{0, 1ull << 40}}),
          encode_put_end(7, 1, 2, "notice"),
          encode_pull_data(8, 1ull << 39, 1 << 20),
          encode_notice(9, "n"),
          encode_ack(7, Status::kStale, "over"),
          encode_empty(FrameType::kCancel, 7),
          encode_empty(FrameType::kGoodbye, 0)};
}

void feed(std::string_view input) {
  if (input.size() < kFrameHeaderBytes) return;
  try {
    const FrameHeader header = FrameHeader::decode(input.substr(0, kFrameHeaderBytes));
    require(header.body <= kMaxBodyBytes && header.payload <= kMaxPayloadBytes);
    const std::string_view body = input.substr(kFrameHeaderBytes, header.body);
    std::string again;
    switch (header.type) {
      case FrameType::kPut:
      case FrameType::kPull: {
        const WindowRanges ranges = WindowRanges::decode(header, body);
        again =
            encode_ranges(header.type, header.id, ranges.window, ranges.generation, ranges.ranges);
        break;
      }
      case FrameType::kPutEnd: {
        const PutEnd end = PutEnd::decode(header, body);
        again = encode_put_end(header.id, end.window, end.generation, end.notice);
        break;
      }
      case FrameType::kPullData:
        again = encode_pull_data(header.id, decode_position(header, body), header.payload);
        break;
      default:
        again = header.encode() + std::string(body);
    }
    require(again == input.substr(0, kFrameHeaderBytes + header.body));
  } catch (const LinkError&) {
  }
}

}  // namespace psrl::fuzz
