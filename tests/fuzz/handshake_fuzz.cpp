// Both halves of the tcp transport's handshake. Who was not given the token gets nowhere.
#include "fuzz.h"
#include "link/auth.h"

namespace psrl::fuzz {
namespace {

using link::Handshake;
using Role = Handshake::Role;
using State = Handshake::State;

constexpr auto kToken = "a token of many bytes";
constexpr auto kAddress = "10.77.0.1:4711";

Handshake half(Role role, const std::string& token = kToken) {
  const bool client = role == Role::kClient;
  return {role, token, client ? "client" : "server", kAddress, std::string(32, client ? 'c' : 's')};
}

struct Said {
  std::string by_client, by_server, challenge;
};

// All that is said when both know the token.
Said conversation() {
  Handshake client = half(Role::kClient), server = half(Role::kServer);
  Said said;
  for (int turn = 0; turn < 2; ++turn) {
    const std::string from_client = client.output();
    server.feed(from_client);
    said.by_client += from_client;
    const std::string from_server = server.output();
    if (turn == 0) said.challenge = from_server;
    client.feed(from_server);
    said.by_server += from_server;
  }
  require(client.state() == State::kDone && server.state() == State::kDone);
  return said;
}

// Fed in two pieces, as it may come.
State told(Handshake half, std::string_view input) {
  const size_t first = half.feed(input.substr(0, input.size() / 2));
  require(first <= input.size() / 2);
  const size_t used = half.feed(input.substr(first));
  require(used <= input.size() - first);
  require(half.peer_name().size() <= link::kMaxNameBytes);
  require(half.reason().size() <= link::kMaxHandshakeBytes);
  require(half.output().size() <= 4 * link::kMaxHandshakeBytes);
  return half.state();
}

}  // namespace

std::vector<std::string> seeds() {
  const Said said = conversation();
  return {said.by_client,
          said.by_server,
          said.by_client.substr(0, 46),
          said.by_server.substr(0, 78),
          {said.by_client + "frames that follow"}};
}

void feed(std::string_view input) {
  static const Said kSaid = conversation();
  // Whoever is let in said what only a holder of the token can say to these nonces.
  const bool proven = input.starts_with(kSaid.by_client);
  require((told(half(Role::kServer), input) == State::kDone) == proven);
  const bool challenged = input.starts_with(kSaid.challenge);
  require(told(half(Role::kClient), input) != State::kDone || challenged);
  require(told(half(Role::kServer, "another token of bytes"), input) != State::kDone);
}

}  // namespace psrl::fuzz
