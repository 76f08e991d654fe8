// The handshake: who knows the token gets in, nobody else, whatever they send back or kept.
#include "link/auth.h"

#include <gtest/gtest.h>

#include <random>

namespace psrl::link {
namespace {

constexpr auto kToken = "a token of many bytes";
constexpr auto kAddress = "10.77.0.1:4711";
using Role = Handshake::Role;
using State = Handshake::State;

Handshake client(const std::string& token = kToken, const std::string& address = kAddress) {
  return Handshake(Role::kClient, token, "client", address);
}
Handshake server(const std::string& token = kToken, const std::string& address = kAddress) {
  return Handshake(Role::kServer, token, "server", address);
}

// Carries bytes between both until nobody has more to say.
void converse(Handshake& a, Handshake& b) {
  for (int turn = 0; turn < 8; ++turn) {
    b.feed(a.output());
    a.feed(b.output());
  }
}

TEST(LinkAuth, BothKnowTheToken) {
  Handshake a = client(), b = server();
  converse(a, b);
  EXPECT_EQ(a.state(), State::kDone);
  EXPECT_EQ(b.state(), State::kDone);
  EXPECT_EQ(a.peer_name(), "server");
  EXPECT_EQ(b.peer_name(), "client");
}

TEST(LinkAuth, EitherRefusesAWrongToken) {
  Handshake a = client("not that one at all"), b = server();
  converse(a, b);
  EXPECT_EQ(a.state(), State::kRefused);
  EXPECT_NE(b.state(), State::kDone);
  EXPECT_NE(a.reason().find("token"), std::string::npos);

  // A client that does not care whether the server proves anything.
  Handshake careless = client(), strict = server("another token than theirs");
  Handshake helper = server();  // knows the client's token
  const std::string hello = careless.output();
  strict.feed(hello);
  helper.feed(hello);
  strict.output();
  careless.feed(helper.output());
  strict.feed(careless.output());
  EXPECT_EQ(strict.state(), State::kRefused);
  EXPECT_NE(strict.output().find("token"), std::string::npos);
}

// What a server says cannot be sent back to it, nor to another one of the same token.
TEST(LinkAuth, ReflectionFails) {
  Handshake victim = client();
  const std::string hello = victim.output();
  victim.feed(hello);  // its own words
  EXPECT_EQ(victim.state(), State::kRefused);

  // The attacker's hello carries the victim's nonce to a real server, whose proof it passes on:
  // that is a relay, and the address in the proof is another one.
  Handshake dialled_elsewhere = client(kToken, "10.77.0.66:1");
  Handshake real = server();
  real.feed(dialled_elsewhere.output());
  dialled_elsewhere.feed(real.output());
  EXPECT_EQ(dialled_elsewhere.state(), State::kRefused);

  // A server's proof as a client's.
  Handshake b = server();
  b.feed(hello);
  const std::string challenge = b.output();
  std::string proof = challenge.substr(0, 8) + challenge.substr(8 + 32, 32);
  proof[5] = 3;
  proof[6] = 32;
  proof[7] = 0;
  b.feed(proof);
  EXPECT_EQ(b.state(), State::kRefused);
}

TEST(LinkAuth, ReplayFails) {
  Handshake a = client(), b = server();
  const std::string hello = a.output();
  b.feed(hello);
  const std::string challenge = b.output();
  a.feed(challenge);
  const std::string proof = a.output();
  b.feed(proof);
  ASSERT_EQ(b.state(), State::kDone);

  Handshake again = server();
  again.feed(hello + proof);
  EXPECT_EQ(again.state(), State::kRefused);
  Handshake other = client();
  other.feed(challenge);
  EXPECT_EQ(other.state(), State::kRefused);
}

TEST(LinkAuth, OutOfOrderIsRefused) {
  for (int kind = 0; kind < 8; ++kind) {
    if (kind == 1) continue;
    Handshake probe = client();
    std::string message = probe.output();
    message[5] = static_cast<char>(kind);
    Handshake b = server();
    b.feed(message);
    EXPECT_EQ(b.state(), State::kRefused) << kind;
  }
}

TEST(LinkAuth, HoldsNoMoreThanOneMessage) {
  Handshake a = client(), b = server();
  const std::string hello = a.output();
  for (size_t cut = 0; cut < hello.size(); ++cut) {
    EXPECT_EQ(b.feed(hello.substr(0, cut)), 0u);
    EXPECT_EQ(b.state(), State::kGoing);
  }
  std::string large = hello;
  large[6] = 0;
  large[7] = 3;  // 768 bytes
  b.feed(large);
  EXPECT_EQ(b.state(), State::kRefused);
}

TEST(LinkAuth, SaysWhichVersionsDoNotFit) {
  Handshake a = client(), b = server();
  std::string hello = a.output();
  hello[4] = 9;
  b.feed(hello);
  EXPECT_EQ(b.state(), State::kRefused);
  EXPECT_NE(b.reason().find("version 9"), std::string::npos) << b.reason();
}

TEST(LinkAuth, GarbageNeverCrashesNorPasses) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 20'000; ++round) {
    Handshake a = client(), b = server();
    std::string said = a.output();
    for (uint64_t left = random() % 4; left > 0; --left) {
      said[random() % said.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) said.resize(random() % said.size());
    b.feed(said);
    std::string answer = b.output();
    for (uint64_t left = 1 + random() % 3; left > 0 && !answer.empty(); --left) {
      answer[random() % answer.size()] ^= static_cast<char>(1 + random() % 255);
    }
    a.feed(answer);
    ASSERT_NE(b.state(), State::kDone);
  }
}

}  // namespace
}  // namespace psrl::link
