#include "link/auth.h"

#include <sys/random.h>

#include "base/errors.h"
#include "link/wire.h"

namespace psrl::link {
namespace {

// Before each message: u32 magic, u8 version, u8 kind, u16 bytes of the body.
constexpr uint32_t kMagic = 0x4b4c5350;  // "PSLK"
constexpr uint8_t kVersion = 1;
constexpr size_t kHeadBytes = 8;
constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = std::tuple_size_v<Digest>;

std::string fresh_nonce() {
  std::string nonce(kNonceBytes, '\0');
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw LinkError("getrandom gave no nonce");
  }
  return nonce;
}

// With its length in front, so that no two lists of parts read the same.
void add_part(std::string& out, std::string_view part) {
  put<uint32_t>(out, static_cast<uint32_t>(part.size()));
  out += part;
}

}  // namespace

Handshake::Handshake(Role role, std::string token, std::string name, std::string address,
                     std::string nonce)
    : role_(role),
      token_(std::move(token)),
      name_(name.substr(0, kMaxNameBytes)),
      address_(std::move(address)),
      nonce_(nonce.empty() ? fresh_nonce() : std::move(nonce)),
      awaited_(role == Role::kClient ? Kind::kChallenge : Kind::kHello) {
  if (role_ == Role::kClient) send(Kind::kHello, nonce_ + name_);
}

size_t Handshake::feed(std::string_view input) {
  size_t used = 0;
  while (state_ == State::kGoing && input.size() - used >= kHeadBytes) {
    const std::string_view rest = input.substr(used);
    const auto length = get<uint16_t>(rest, 6);
    if (get<uint32_t>(rest, 0) != kMagic) {
      refuse("the peer does not speak this protocol");
    } else if (get<uint8_t>(rest, 4) != kVersion) {
      refuse("the peer speaks version " + std::to_string(get<uint8_t>(rest, 4)) +
             " of the protocol, this side version " + std::to_string(kVersion));
    } else if (length > kMaxHandshakeBytes) {
      refuse("a handshake of " + std::to_string(length) + " bytes");
    } else {
      if (rest.size() - kHeadBytes < length) break;
      used += kHeadBytes + length;
      receive(static_cast<Kind>(get<uint8_t>(rest, 5)), rest.substr(kHeadBytes, length));
    }
  }
  return used;
}

void Handshake::receive(Kind kind, std::string_view body) {
  if (kind == Kind::kRefusal && role_ == Role::kClient) {
    state_ = State::kRefused;
    reason_ = body;
    return;
  }
  if (kind != awaited_) return refuse("the peer broke the handshake");
  switch (kind) {
    case Kind::kHello:
      if (body.size() < kNonceBytes || body.size() > kNonceBytes + kMaxNameBytes) {
        return refuse("the peer broke the handshake");
      }
      peer_nonce_ = body.substr(0, kNonceBytes);
      peer_name_ = body.substr(kNonceBytes);
      {
        const Digest proof = proof_of(role_);
        send(Kind::kChallenge, nonce_ + std::string(proof.begin(), proof.end()) + name_);
      }
      awaited_ = Kind::kProof;
      return;
    case Kind::kChallenge:
      if (body.size() < kNonceBytes + kProofBytes ||
          body.size() > kNonceBytes + kProofBytes + kMaxNameBytes) {
        return refuse("the peer broke the handshake");
      }
      peer_nonce_ = body.substr(0, kNonceBytes);
      peer_name_ = body.substr(kNonceBytes + kProofBytes);
      if (peer_nonce_ == nonce_ || !proves(body.substr(kNonceBytes, kProofBytes), Role::kServer)) {
        return refuse("the peer does not know the token");
      }
      {
        const Digest proof = proof_of(role_);
        send(Kind::kProof, {reinterpret_cast<const char*>(proof.data()), proof.size()});
      }
      awaited_ = Kind::kWelcome;
      return;
    case Kind::kProof:
      if (!proves(body, Role::kClient)) return refuse("the peer does not know the token");
      send(Kind::kWelcome, {});
      state_ = State::kDone;
      return;
    case Kind::kWelcome:
      state_ = State::kDone;
      return;
    case Kind::kRefusal:
      return refuse("the peer broke the handshake");
  }
}

void Handshake::send(Kind kind, std::string_view body) {
  put<uint32_t>(output_, kMagic);
  put<uint8_t>(output_, kVersion);
  put<uint8_t>(output_, static_cast<uint8_t>(kind));
  put<uint16_t>(output_, static_cast<uint16_t>(body.size()));
  output_ += body;
}

void Handshake::refuse(const std::string& reason) {
  state_ = State::kRefused;
  reason_ = reason;
  if (role_ == Role::kServer) send(Kind::kRefusal, reason);
}

Digest Handshake::proof_of(Role role) const {
  const bool client = role_ == Role::kClient;
  std::string said = role == Role::kClient ? "psrl link 1 client" : "psrl link 1 server";
  for (const std::string* part :
       {client ? &nonce_ : &peer_nonce_, client ? &peer_nonce_ : &nonce_,
        client ? &name_ : &peer_name_, client ? &peer_name_ : &name_, &address_}) {
    add_part(said, *part);
  }
  return hmac_sha256(token_, said);
}

bool Handshake::proves(std::string_view proof, Role role) const {
  Digest given{};
  if (proof.size() != given.size()) return false;
  std::copy(proof.begin(), proof.end(), given.begin());
  return equal_in_constant_time(given, proof_of(role));
}

}  // namespace psrl::link
