// Adverts of windows, which travel in messages of others.
#include "base/errors.h"
#include "fuzz.h"
#include "link/link.h"

namespace psrl::fuzz {

using link::Advert;

std::vector<std::string> seeds() {
  Advert pull{.window = 1, .generation = 1ull << 62, .length = 1 << 30, .key = {}};
  pull.access = link::WindowAccess::kPull;
  return {Advert{.window = 7, .generation = 9, .length = 5000, .key = "an rkey"}.encode(),
          Advert{.length = ~uint64_t{}, .key = std::string(900, 'k')}.encode(), pull.encode()};
}

void feed(std::string_view input) {
  try {
    require(Advert::decode(input).encode() == input);
  } catch (const LinkError&) {
  }
}

}  // namespace psrl::fuzz
