// Addresses and sockets of the tcp transport.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/fd.h"

namespace psrl::link::tcp {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  // "10.77.0.1:4711", "[::1]:4711"
  std::string text() const;
};

// "tcp:HOST:PORT", HOST a number ("[...]" for IPv6): connect() must not wait for a name server.
// Raises LinkError.
SocketAddress parse_address(const std::string& address);

// A listening socket; `host` may be a name of this host. Raises LinkError.
Fd listen_on(const std::string& host, uint16_t port);

// A socket that is connecting. Raises LinkError.
Fd begin_connect(const SocketAddress& address);

// Small frames leave at once; a host that is gone is noticed.
void tune(int socket);

// How much the kernel takes before it is sent.
void limit_unsent(int socket, uint64_t bytes);

SocketAddress local_address(int socket);
SocketAddress peer_address(int socket);

}  // namespace psrl::link::tcp
