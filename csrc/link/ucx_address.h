// Where a ucx endpoint is: addresses and the network interfaces that have them.
#pragma once

#include <sys/socket.h>

#include <string>

namespace psrl::link::ucx {

// "HOST:PORT", "[V6]:PORT"; false if it cannot be read as such.
bool split(const std::string& address, std::string* host, std::string* port);

bool resolve(const std::string& host, const std::string& port, bool listen, sockaddr_storage* where,
             socklen_t* num_where);

// The network interface that has this address, if any; and whether its carrier is there.
std::string interface_of(const sockaddr_storage& where, bool* is_running);

bool has_rdma_devices();

}  // namespace psrl::link::ucx
