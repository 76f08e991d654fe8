// The handshake of the tcp transport: both sides prove that they know the token, neither shows it.
//
//     client                                     server
//     hello    {version, nonce, name}       -->
//                                           <--  challenge {nonce, name, proof of the server}
//     proof    {proof of the client}        -->
//                                           <--  welcome, or a refusal with its reason
//
// A proof is HMAC(token, role + both nonces + both names + the address that the client dialled).
// Nonces are fresh, so what was recorded proves nothing later; roles differ, so a proof cannot be
// sent back to who made it; the address differs, so a process elsewhere cannot pass it on as its
// own. The token authenticates who is there when a connection begins; what follows is neither
// encrypted nor signed.
//
// A pure state machine: bytes in, bytes out. It holds at most one message.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "base/sha256.h"

namespace psrl::link {

inline constexpr size_t kMinTokenBytes = 16;
inline constexpr size_t kMaxNameBytes = 200;
inline constexpr size_t kMaxHandshakeBytes = 512;  // of one message

class Handshake {
 public:
  enum class Role : uint8_t { kClient, kServer };
  enum class State : uint8_t { kGoing, kDone, kRefused };

  // `address`: where the server was dialled, as both sides see it. `nonce` is drawn if empty.
  Handshake(Role role, std::string token, std::string name, std::string address,
            std::string nonce = {});

  // Takes what it can use of `input` and says how much; `output()` then has what is to be sent.
  // What is malformed ends in kRefused.
  size_t feed(std::string_view input);
  // Moves it out. May be something also after kRefused: the reason, for the peer.
  std::string output() { return std::exchange(output_, {}); }

  State state() const { return state_; }
  const std::string& peer_name() const { return peer_name_; }
  const std::string& reason() const { return reason_; }  // of kRefused

 private:
  enum class Kind : uint8_t { kHello = 1, kChallenge, kProof, kWelcome, kRefusal };

  void send(Kind kind, std::string_view body);
  void receive(Kind kind, std::string_view body);
  void refuse(const std::string& reason);
  Digest proof_of(Role role) const;
  bool proves(std::string_view proof, Role role) const;

  const Role role_;
  const std::string token_, name_, address_, nonce_;
  std::string peer_nonce_, peer_name_, reason_, output_;
  Kind awaited_;
  State state_ = State::kGoing;
};

}  // namespace psrl::link
