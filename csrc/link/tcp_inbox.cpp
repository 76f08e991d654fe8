#include "link/tcp_inbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/errors.h"
#include "link/tcp_socket.h"

namespace psrl::link::tcp {
namespace {

constexpr size_t kReadAhead = 4096;
constexpr size_t kFrameBytes = kFrameHeaderBytes + kMaxBodyBytes;
constexpr size_t kForgetBytes = 256 << 10;
constexpr size_t kMaxParts = 64;  // of one readv

// Bytes that go nowhere are written here; each progress thread has its own.
char* nowhere() {
  thread_local std::vector<char> bytes(kForgetBytes);
  return bytes.data();
}

}  // namespace

Inbox::Inbox(WindowTable& windows) : windows_(windows), buffer_(kReadAhead) {}

// At least `bytes` in all from begin_ on, and some to read ahead.
void Inbox::make_room(size_t bytes) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (buffer_.size() - begin_ >= bytes && buffer_.size() > end_) return;
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  if (buffer_.size() < bytes) buffer_.resize(kFrameBytes + kReadAhead);
}

Inbox::Got Inbox::read_raw(int socket) {
  make_room(1);
  const ssize_t got = ::recv(socket, buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
  if (got == 0) return Got::kEnd;
  if (got > 0) {
    end_ += static_cast<size_t>(got);
    return Got::kMore;
  }
  if (errno == EINTR) return Got::kMore;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return Got::kDry;
  throw LinkError("the connection broke: " + error_text(errno));
}

Inbox::Got Inbox::read(int socket, Handler& handler) {
  iovec list[kMaxParts + 1];
  size_t count = 0, asked = 0;
  const auto lock = hold_window(handler);
  if (in_payload_ && forgotten_) {
    list[count++] = {nowhere(), std::min<size_t>(left_, kForgetBytes)};
    asked = list[0].iov_len;
  } else if (in_payload_) {
    for (size_t i = part_; i < parts_.size() && count < kMaxParts; ++i) {
      list[count++] = parts_[i];
      asked += parts_[i].iov_len;
    }
  } else {
    size_t needed = kFrameHeaderBytes;
    if (end_ - begin_ >= kFrameHeaderBytes) needed += header_.body;
    make_room(needed);
  }
  if (asked == 0 || asked == left_) {  // the next bytes are a header's
    make_room(1);
    list[count++] = {buffer_.data() + end_, buffer_.size() - end_};
    asked += buffer_.size() - end_;
  }
  msghdr message{};
  message.msg_iov = list;
  message.msg_iovlen = count;
  const ssize_t result = ::recvmsg(socket, &message, MSG_DONTWAIT);
  if (result == 0) return Got::kEnd;
  if (result < 0) {
    if (errno == EINTR) return Got::kMore;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Got::kDry;
    throw LinkError("the connection broke: " + error_text(errno));
  }
  auto got = static_cast<size_t>(result);
  if (in_payload_) {
    const size_t direct = std::min<size_t>(got, left_);
    advance(direct);
    got -= direct;
  }
  end_ += got;
  return static_cast<size_t>(result) < asked ? Got::kDry : Got::kMore;
}

void Inbox::parse(Handler& handler) {
  while (true) {
    if (in_payload_) {
      const auto lock = hold_window(handler);
      while (left_ > 0 && begin_ < end_) {
        size_t taken = std::min<size_t>(left_, end_ - begin_);
        if (!forgotten_) {
          taken = std::min(taken, parts_[part_].iov_len);
          std::memcpy(parts_[part_].iov_base, buffer_.data() + begin_, taken);
        }
        begin_ += taken;
        advance(taken);
      }
      if (in_payload_) return;
    }
    if (end_ - begin_ < kFrameHeaderBytes) return;
    header_ = FrameHeader::decode(raw().substr(0, kFrameHeaderBytes));
    if (end_ - begin_ < kFrameHeaderBytes + header_.body) return;
    const std::string_view body = raw().substr(kFrameHeaderBytes, header_.body);
    begin_ += kFrameHeaderBytes + header_.body;
    forgotten_ = true;
    window_.reset();
    handler.on_frame(header_, body);
    left_ = header_.payload;
    in_payload_ = left_ > 0;
  }
}

void Inbox::receive_into(std::vector<iovec> parts, WindowPtr window) {
  parts_ = std::move(parts);
  part_ = 0;
  window_ = std::move(window);
  forgotten_ = false;
}

void Inbox::forget(FrameType type, uint64_t id) {
  if (in_payload_ && header_.type == type && header_.id == id) {
    forgotten_ = true;
    window_.reset();
  }
}

void Inbox::advance(size_t bytes) {
  left_ -= bytes;
  payload_bytes_ += bytes;
  if (!forgotten_) {
    for (size_t rest = bytes; rest > 0;) {
      iovec& part = parts_[part_];
      const size_t taken = std::min(rest, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      rest -= taken;
      if (part.iov_len == 0) ++part_;
    }
  }
  if (left_ == 0) {
    in_payload_ = false;
    window_.reset();
  }
}

std::unique_lock<std::mutex> Inbox::hold_window(Handler& handler) {
  if (!in_payload_ || window_ == nullptr) return {};
  std::unique_lock lock(windows_.touching());
  if (window_->region != nullptr) return lock;
  lock.unlock();
  forgotten_ = true;
  window_.reset();
  handler.on_cut(header_.id);
  return {};
}

}  // namespace psrl::link::tcp
