#include "link/ucx_wire.h"

#include <cstring>

#include "base/errors.h"

namespace psrl::link::ucx {
namespace {

// All hosts are little-endian, as for all bulk data; fields have fixed places.
struct Header {
  uint32_t protocol;
  uint8_t kind, status, access, unused;
  uint64_t op, window, generation, base;
  uint32_t num_text, num_key;
  uint64_t num_pieces;
};
static_assert(sizeof(Header) == 56);
static_assert(sizeof(Piece) == 24);

[[noreturn]] void bad(const std::string& what) { throw LinkError("a broken message: " + what); }

}  // namespace

std::string encode(const Message& message) {
  const Header header{
      .protocol = kProtocol,
      .kind = static_cast<uint8_t>(message.kind),
      .status = static_cast<uint8_t>(message.status),
      .access = static_cast<uint8_t>(message.access),
      .unused = 0,
      .op = message.op,
      .window = message.window,
      .generation = message.generation,
      .base = message.base,
      .num_text = static_cast<uint32_t>(message.text.size()),
      .num_key = static_cast<uint32_t>(message.key.size()),
      .num_pieces = message.pieces.size(),
  };
  const size_t num_piece_bytes = message.pieces.size() * sizeof(Piece);
  std::string out;
  out.reserve(sizeof(header) + message.text.size() + message.key.size() + num_piece_bytes);
  out.append(reinterpret_cast<const char*>(&header), sizeof(header));
  out += message.text;
  out += message.key;
  out.append(reinterpret_cast<const char*>(message.pieces.data()), num_piece_bytes);
  return out;
}

Message decode(std::string_view bytes, std::string_view* rest) {
  Header header;
  if (bytes.size() < sizeof(header)) bad(std::to_string(bytes.size()) + " bytes");
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.protocol != kProtocol) {
    bad("protocol " + std::to_string(header.protocol) + ", not " + std::to_string(kProtocol));
  }
  if (header.kind < static_cast<uint8_t>(Kind::kHello) ||
      header.kind > static_cast<uint8_t>(Kind::kGoodbye)) {
    bad("kind " + std::to_string(header.kind));
  }
  if (header.status > static_cast<uint8_t>(Status::kClosed)) {
    bad("status " + std::to_string(header.status));
  }
  if (header.access != static_cast<uint8_t>(WindowAccess::kPut) &&
      header.access != static_cast<uint8_t>(WindowAccess::kPull)) {
    bad("access " + std::to_string(header.access));
  }
  bytes.remove_prefix(sizeof(header));
  const auto take = [&bytes](uint64_t size) {
    if (size > bytes.size()) bad("shorter than it says");
    const auto taken = bytes.substr(0, size);
    bytes.remove_prefix(size);
    return taken;
  };
  Message message{
      .kind = static_cast<Kind>(header.kind),
      .status = static_cast<Status>(header.status),
      .access = static_cast<WindowAccess>(header.access),
      .op = header.op,
      .window = header.window,
      .generation = header.generation,
      .base = header.base,
      .text = std::string(take(header.num_text)),
      .key = std::string(take(header.num_key)),
      .pieces = {},
  };
  if (header.num_pieces > bytes.size() / sizeof(Piece)) bad("fewer pieces than it says");
  const auto pieces = take(header.num_pieces * sizeof(Piece));
  message.pieces.resize(header.num_pieces);
  if (!pieces.empty()) std::memcpy(message.pieces.data(), pieces.data(), pieces.size());
  *rest = bytes;
  return message;
}

}  // namespace psrl::link::ucx
