#ifdef PSRL_WITH_UCX

#include "link/ucx_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/stat.h>

#include <cstring>

namespace psrl::link::ucx {

// "HOST:PORT", "[V6]:PORT"; false if it cannot be read as such.
bool split(const std::string& address, std::string* host, std::string* port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) return false;
  *host = address.substr(0, colon);
  *port = address.substr(colon + 1);
  if (host->front() == '[' && host->back() == ']') *host = host->substr(1, host->size() - 2);
  return port->find_first_not_of("0123456789") == std::string::npos && port->size() <= 5;
}

bool resolve(const std::string& host, const std::string& port, bool listen, sockaddr_storage* where,
             socklen_t* num_where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (listen ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return false;
  std::memcpy(where, found->ai_addr, found->ai_addrlen);
  *num_where = found->ai_addrlen;
  ::freeaddrinfo(found);
  return true;
}

// The network interface that has this address, if any; and whether its carrier is there.
std::string interface_of(const sockaddr_storage& where, bool* is_running) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  std::string name;
  for (const ifaddrs* one = all; one != nullptr && name.empty(); one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != where.ss_family) continue;
    bool same = false;
    if (where.ss_family == AF_INET) {
      same = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr.s_addr ==
             reinterpret_cast<const sockaddr_in&>(where).sin_addr.s_addr;
    } else if (where.ss_family == AF_INET6) {
      same = std::memcmp(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr,
                         &reinterpret_cast<const sockaddr_in6&>(where).sin6_addr, 16) == 0;
    }
    if (!same) continue;
    name = one->ifa_name;
    *is_running = (one->ifa_flags & IFF_RUNNING) != 0;
  }
  ::freeifaddrs(all);
  return name;
}

bool has_rdma_devices() {
  struct stat info{};
  return ::stat("/dev/infiniband", &info) == 0;
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
