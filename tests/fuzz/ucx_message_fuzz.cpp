// Messages between ucx endpoints.
#include "base/errors.h"
#include "fuzz.h"
#include "link/ucx_wire.h"

namespace psrl::fuzz {

using namespace link::ucx;

std::vector<std::string> seeds() {
  return {
      encode({.kind = Kind::kHello, .text = "a name"}),
      encode({.kind = Kind::kAsk, .op = 7, .window = 1, .generation = 9, .pieces = {{0, 10, 20}}}),
      encode({.kind = Kind::kData, .op = 7, .window = 1, .pieces = {{0, 0, 3}, {5, 6, 7}}}) + "abc",
      encode({.kind = Kind::kPull, .base = 1ull << 40, .key = "an rkey", .pieces = {{1, 2, 3}}}),
      encode({.kind = Kind::kVerdict, .status = link::Status::kStale, .op = 8, .text = "over"}),
      encode({.kind = Kind::kGoodbye})};
}

void feed(std::string_view input) {
  try {
    std::string_view rest;
    const Message message = decode(input, &rest);
    require(rest.size() <= input.size() && rest.end() == input.end());
    require(encode(message).size() + rest.size() == input.size());
  } catch (const LinkError&) {
  }
}

}  // namespace psrl::fuzz
