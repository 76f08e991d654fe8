// The other process of the link tests: started by PeerProcess, skipped as a test.
//
//     says    ADDRESS ADVERT ADVERT       of its whole memory, for puts and for pulls
//     hears   check SEED OFFSET LENGTH    answers yes or no
//             fill SEED                   ok
//             put ADDRESS ADVERT          connects and puts all its memory there for ever: ok, once
//             begun withdraw                    the put window: ok close                       ok
//             or late
#include <cstdlib>
#include <iostream>

#include "link_testing.h"

namespace psrl::link::testing {

std::vector<Transport> transports() {
  return {
      {"tcp", [](const EndpointOptions& options) { return make_tcp_endpoint(options); }},
#ifdef PSRL_WITH_UCX
      {"ucx", [](const EndpointOptions& options) { return make_ucx_endpoint(options); }},
#endif
  };
}

namespace {

TEST(LinkPeer, DISABLED_Run) {
  const char* const setting = std::getenv("PSRL_LINK_PEER");
  if (setting == nullptr) GTEST_SKIP() << "a helper of other tests";
  std::istringstream settings(setting);
  std::string transport;
  size_t bytes = 0;
  settings >> transport >> bytes;
  FILE* const in_pipe = ::fdopen(3, "r");
  FILE* const out_pipe = ::fdopen(4, "w");
  const auto say = [&](const std::string& text) {
    std::fprintf(out_pipe, "%s\n", text.c_str());
    std::fflush(out_pipe);
  };

  Node node(transport, "child", bytes);
  const Advert put_window = node.window(WindowAccess::kPut);
  const Advert pull_window = node.window(WindowAccess::kPull);
  say(node->address() + " " + to_hex(put_window.encode()) + " " + to_hex(pull_window.encode()));
  char line[8192];
  while (std::fgets(line, sizeof(line), in_pipe) != nullptr) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "check") {
      uint64_t seed = 0, offset = 0, length = 0;
      words >> seed >> offset >> length;
      say(node.holds(seed, offset, length) ? "yes" : "no");
    } else if (word == "fill") {
      uint64_t seed = 0;
      words >> seed;
      node.fill(seed);
      say("ok");
    } else if (word == "put") {
      std::string address, advert;
      words >> address >> advert;
      const PeerId peer = node.connect(address);
      say("ok");
      const Advert into = Advert::decode(from_hex(advert));
      while (node.done(node.put(peer, into, {{0, 0, bytes}}, "again")).status == Status::kOk) {
      }
    } else if (word == "withdraw") {
      node->withdraw(put_window);
      say("ok");
    } else if (word == "close") {
      say(node->close(in(kPatience)) ? "ok" : "late");
    }
  }
}

}  // namespace
}  // namespace psrl::link::testing
