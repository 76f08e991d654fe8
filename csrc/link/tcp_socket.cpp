#include "link/tcp_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <system_error>

#include "base/errors.h"

namespace psrl::link::tcp {
namespace {

constexpr int kBacklog = 1024;
// A silent host is lost after kIdleSeconds + kProbes * kProbeSeconds, or when bytes sent to it were
// not acknowledged, or its window stayed shut, for kUnansweredMs.
constexpr int kIdleSeconds = 10, kProbeSeconds = 5, kProbes = 4;
constexpr int kUnansweredMs = 30'000;

SocketAddress look_up(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) throw LinkError("no address " + host + ": " + ::gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.length = list->ai_addrlen;
  return address;
}

bool is_wildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr == INADDR_ANY;
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
}

Fd new_socket(const SocketAddress& address) {
  Fd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw LinkError("no socket: " + error_text(errno));
  return socket;
}

void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof(value));
}

}  // namespace

std::string SocketAddress::text() const {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), length, host, sizeof(host), port,
                    sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  const std::string bracketed =
      storage.ss_family == AF_INET6 ? "[" + std::string(host) + "]" : std::string(host);
  return bracketed + ":" + port;
}

SocketAddress parse_address(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (!address.starts_with("tcp:") || colon < 5) {
    throw LinkError("not an address of a tcp link: '" + address + "'; one looks like " +
                    "tcp:10.77.0.1:4711");
  }
  std::string host = address.substr(4, colon - 4);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  uint16_t port = 0;
  const char* const end = address.data() + address.size();
  const auto [parsed, error] = std::from_chars(address.data() + colon + 1, end, port);
  if (error != std::errc() || parsed != end || port == 0) {
    throw LinkError("not an address of a tcp link: '" + address + "': no port");
  }
  return look_up(host, port, AI_NUMERICHOST);
}

Fd listen_on(const std::string& host, uint16_t port) {
  const SocketAddress address = look_up(host, port, 0);
  if (is_wildcard(address)) {
    throw LinkError("a link listens on an address that peers can connect to, not on " + host);
  }
  Fd socket = new_socket(address);
  set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) !=
          0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw LinkError("cannot listen on " + address.text() + ": " + error_text(errno));
  }
  return socket;
}

Fd begin_connect(const SocketAddress& address) {
  Fd socket = new_socket(address);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.storage),
                address.length) != 0 &&
      errno != EINPROGRESS) {
    throw LinkError(error_text(errno));
  }
  return socket;
}

void tune(int socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnansweredMs);
}

void limit_unsent(int socket, uint64_t bytes) {
  set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(bytes));
}

SocketAddress local_address(int socket) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

SocketAddress peer_address(int socket) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  ::getpeername(socket, reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

}  // namespace psrl::link::tcp
