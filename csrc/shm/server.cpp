#include "shm/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/errors.h"

namespace psrl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxName = 256;
constexpr size_t kMaxReply = 4096;
constexpr size_t kMaxClients = 64;
constexpr auto kPatience = std::chrono::seconds(10);  // for a connected client's request

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    throw StorageError("socket path has " + std::to_string(path.size()) + " bytes, at most " +
                       std::to_string(sizeof(address.sun_path) - 1) + " are possible: " + path);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == ::geteuid();
}

// One packet, with `fd` attached unless it is -1.
bool send_packet(int socket, const std::string& data, int fd) {
  iovec part{const_cast<char*>(data.data()), data.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(data.size());
}

struct Packet {
  std::string data;
  Fd fd;
};

Packet receive_packet(int socket) {
  Packet packet;
  packet.data.resize(kMaxReply);
  iovec part{packet.data.data(), packet.data.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  packet.data.resize(static_cast<size_t>(std::max<ssize_t>(received, 0)));
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
      packet.fd = Fd(fd);
    }
  }
  return packet;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1000));
}

// A connection to `path`, tried again while nobody listens there yet; empty at the deadline.
Fd connect_until(const std::string& path, Clock::time_point deadline) {
  const sockaddr_un address = address_of(path);
  while (true) {
    Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) throw_errno("socket");
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
        0) {
      return socket;
    }
    // Not there yet, not listening yet, or its backlog is full.
    if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN) {
      throw_errno("segment server " + path);
    }
    if (Clock::now() >= deadline) return Fd();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::min(20, milliseconds_until(deadline))));
  }
}

}  // namespace

SegmentServer::SegmentServer(const std::string& path)
    : path_(path),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!listener_ || !stop_) throw_errno("segment server " + path);
  const sockaddr_un address = address_of(path);
  // Before bind: the path is never open to others, whatever the umask.
  if (::fchmod(listener_.get(), 0600) != 0) throw_errno("segment server " + path);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener_.get(), 128) != 0) {
    throw_errno("segment server cannot listen on " + path);
  }
  thread_ = std::thread([this] { serve(); });
}

SegmentServer::~SegmentServer() { close(); }

void SegmentServer::add(std::shared_ptr<Segment> segment) {
  const std::lock_guard lock(mutex_);
  const std::string name = segment->name();
  segments_[name] = std::move(segment);
}

void SegmentServer::close() {
  if (!thread_.joinable()) return;
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
  ::unlink(path_.c_str());
  listener_ = Fd();
  const std::lock_guard lock(mutex_);
  segments_.clear();
}

void SegmentServer::serve() {
  struct Client {
    Fd fd;
    Clock::time_point deadline;
  };
  std::vector<Client> clients;
  std::vector<pollfd> polled;
  while (true) {
    polled.clear();
    polled.push_back({stop_.get(), POLLIN, 0});
    const bool may_accept = clients.size() < kMaxClients;
    polled.push_back({listener_.get(), static_cast<short>(may_accept ? POLLIN : 0), 0});
    for (const Client& client : clients) polled.push_back({client.fd.get(), POLLIN, 0});
    if (::poll(polled.data(), polled.size(), clients.empty() ? -1 : 1000) < 0 && errno != EINTR) {
      return;
    }
    if (polled[0].revents != 0) return;

    for (size_t i = 0; i < clients.size(); ++i) {
      if (polled[i + 2].revents == 0) continue;
      answer(clients[i].fd.get());
      clients[i].deadline = Clock::time_point::min();  // one request a connection
    }
    const auto now = Clock::now();
    std::erase_if(clients, [now](const Client& client) { return client.deadline <= now; });

    if (polled[1].revents & POLLIN) {
      Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (client) {
        clients.push_back({std::move(client), now + kPatience});
      } else if (errno == EMFILE || errno == ENFILE) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the client waits in line
      }
    }
  }
}

void SegmentServer::answer(int client) {
  const std::string name = receive_packet(client).data;
  if (name.empty() || name.size() > kMaxName) return;
  if (!same_user(client)) {
    send_packet(client, "\1another user's process", -1);
    return;
  }
  std::shared_ptr<Segment> segment;
  std::string names;
  {
    const std::lock_guard lock(mutex_);
    const auto found = segments_.find(name);
    if (found != segments_.end()) segment = found->second;
    for (const auto& [other, unused] : segments_) names += (names.empty() ? "" : ", ") + other;
  }
  if (segment != nullptr) {
    send_packet(client, std::string(1, '\0'), segment->fd());
    return;
  }
  std::string text =
      "\1no segment named " + name + "; there " + (names.empty() ? "are none" : "are: " + names);
  text.resize(std::min(text.size(), kMaxReply));
  send_packet(client, text, -1);
}

std::shared_ptr<Segment> fetch_segment(const std::string& path, const std::string& name,
                                       std::chrono::duration<double> timeout, Access access) {
  if (name.empty() || name.size() > kMaxName)
    throw UnknownKey("not a segment's name: '" + name + "'");
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  const std::string late = " within " + std::to_string(timeout.count()) + " s";
  const Fd socket = connect_until(path, deadline);
  if (!socket) throw StorageError("nobody served segments at " + path + late);
  if (!same_user(socket.get())) throw StorageError(path + " is served by another user");
  if (!send_packet(socket.get(), name, -1)) throw_errno("segment server " + path);

  pollfd polled{socket.get(), POLLIN, 0};
  while (::poll(&polled, 1, milliseconds_until(deadline)) <= 0) {
    if (Clock::now() >= deadline)
      throw StorageError("no answer from segment server " + path + late);
  }
  const Packet reply = receive_packet(socket.get());
  if (reply.data.empty()) throw StorageError("segment server " + path + " closed the connection");
  if (reply.data[0] != 0) throw UnknownKey(path + ": " + reply.data.substr(1));
  if (!reply.fd) throw StorageError(path + ": no descriptor came with segment " + name);
  return Segment::attach(reply.fd.get(), access);
}

}  // namespace psrl
