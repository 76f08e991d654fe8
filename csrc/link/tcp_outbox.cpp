#include "link/tcp_outbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

#include "base/errors.h"
#include "link/tcp_socket.h"

namespace psrl::link::tcp {
namespace {

constexpr uint64_t kShareBytes = 4 * kChunkBytes;  // of one write(), then others have a turn
constexpr size_t kMaxBatchParts = 400;             // with one more frame still below IOV_MAX
std::array<char, 64 << 10> zeros;

}  // namespace

void Outbox::submit(const Op& op) {
  if (waiting_.empty() && in_flight_.size() < kMaxInFlight) {
    admit(op);
  } else {
    waiting_.emplace(op.id, &op);
  }
}

void Outbox::admit(const Op& op) {
  in_flight_.insert(op.id);
  if (op.kind == Op::Kind::kNotify) {
    notices_.emplace(op.id, &op);
    return;
  }
  Transfer& transfer = puts_[op.id];
  transfer.id = op.id;
  transfer.put = &op;
  for (const Piece& piece : op.pieces) transfer.total += piece.length;
  unframed_puts_.insert(op.id);
  start(transfer);
}

void Outbox::serve(uint64_t id, WindowPtr window, std::vector<Range> ranges) {
  Transfer& transfer = served_[id];
  transfer.id = id;
  transfer.window = std::move(window);
  transfer.ranges = std::move(ranges);
  for (const Range& range : transfer.ranges) transfer.total += range.length;
  start(transfer);
}

void Outbox::start(Transfer& transfer) {
  (transfer.total <= kChunkBytes ? small_ : large_).push_back(&transfer);
}

void Outbox::ended(OpId id) {
  if (waiting_.erase(id) == 0 && in_flight_.erase(id) != 0) {
    notices_.erase(id);
    if (const auto found = puts_.find(id); found != puts_.end()) {
      drop(found->second);
      unframed_puts_.erase(id);
      puts_.erase(found);
      control_ += encode_empty(FrameType::kCancel, id);
    }
  }
  while (!waiting_.empty() && in_flight_.size() < kMaxInFlight) {
    const Op& op = *waiting_.begin()->second;
    waiting_.erase(waiting_.begin());
    admit(op);
  }
}

void Outbox::stop_serving(uint64_t id) {
  const auto found = served_.find(id);
  if (found == served_.end()) return;
  drop(found->second);
  served_.erase(found);
}

// Takes all of it out of the batch that was not begun, and pads what was.
void Outbox::drop(Transfer& transfer) {
  std::erase(small_, &transfer);
  std::erase(large_, &transfer);
  std::erase(batch_done_, &transfer);
  std::vector<iovec> iov;
  std::vector<Tag> tags;
  bool pad = true;  // the next payload's head was sent or is kept
  for (size_t i = cursor_; i < iov_.size(); ++i) {
    Tag tag = tags_[i];
    if (tag.transfer != &transfer) {
      iov.push_back(iov_[i]);
      tags.push_back(tag);
      continue;
    }
    tag.transfer = nullptr;
    switch (tag.kind) {
      case Kind::kHead:
      case Kind::kTail:
        pad = tag.begun;
        if (!tag.begun) continue;
        iov.push_back(iov_[i]);
        tags.push_back(tag);
        continue;
      case Kind::kPayload:
        for (size_t left = pad ? iov_[i].iov_len : 0; left > 0;) {
          const size_t length = std::min(left, zeros.size());
          iov.push_back({zeros.data(), length});
          tags.push_back(tag);
          left -= length;
        }
        continue;
      case Kind::kControl:
        continue;
    }
  }
  iov_ = std::move(iov);
  tags_ = std::move(tags);
  cursor_ = 0;
}

// A notice goes after everything that was put before it, so that it is read after it.
void Outbox::take_notices() {
  while (!notices_.empty() &&
         (unframed_puts_.empty() || notices_.begin()->first < *unframed_puts_.begin())) {
    const Op& op = *notices_.begin()->second;
    control_ += encode_notice(op.id, op.notice);
    notices_.erase(notices_.begin());
  }
}

Outbox::Transfer* Outbox::next_transfer() {
  if (!small_.empty() && (small_turn_ || large_.empty())) {
    small_turn_ = false;
    return small_.front();
  }
  small_turn_ = true;
  if (large_.empty()) return nullptr;
  large_turn_ ^= 1;
  return large_[std::min(large_turn_, large_.size() - 1)];
}

void Outbox::add(std::string bytes, Tag tag) {
  texts_.push_back(std::move(bytes));
  iov_.push_back({texts_.back().data(), texts_.back().size()});
  tags_.push_back(tag);
  batch_bytes_ += texts_.back().size();
}

// One frame of the transfer, and its tail if that was all of it.
void Outbox::add_frame(Transfer& transfer) {
  std::vector<Range> ranges;
  std::vector<iovec> payload;
  uint64_t bytes = 0;
  while (transfer.index < transfer.num_parts() && ranges.size() < kMaxRanges &&
         bytes < kChunkBytes) {
    uint64_t offset = 0, length = 0;
    const std::byte* data = nullptr;
    if (transfer.served()) {
      const Range& range = transfer.ranges[transfer.index];
      offset = range.offset, length = range.length;
      data = transfer.window->base + range.offset;
    } else {
      const Piece& piece = transfer.put->pieces[transfer.index];
      offset = piece.remote_offset, length = piece.length;
      data = transfer.put->region->const_bytes.data() + piece.local_offset;
    }
    const uint64_t taken = std::min(length - transfer.within, kChunkBytes - bytes);
    ranges.push_back({offset + transfer.within, taken});
    payload.push_back({const_cast<std::byte*>(data) + transfer.within, taken});
    bytes += taken;
    transfer.within += taken;
    if (transfer.within == length) {
      transfer.index += 1;
      transfer.within = 0;
    }
  }
  if (bytes > 0) {
    add(transfer.served() ? encode_pull_data(transfer.id, transfer.position, bytes)
                          : encode_ranges(FrameType::kPut, transfer.id, transfer.put->window,
                                          transfer.put->generation, ranges),
        {Kind::kHead, &transfer});
    for (const iovec& part : payload) {
      iov_.push_back(part);
      tags_.push_back({Kind::kPayload, &transfer});
    }
    transfer.position += bytes;
    batch_bytes_ += bytes;
    data_bytes_ += bytes;
  }
  if (transfer.index < transfer.num_parts()) return;

  add(transfer.served() ? encode_ack(transfer.id, Status::kOk, {})
                        : encode_put_end(transfer.id, transfer.put->window,
                                         transfer.put->generation, transfer.put->notice),
      {Kind::kTail, &transfer});
  if (!transfer.served()) unframed_puts_.erase(transfer.id);
  std::erase(small_, &transfer);
  std::erase(large_, &transfer);
  batch_done_.push_back(&transfer);
}

// The next batch; false: there is nothing to send.
bool Outbox::fill() {
  take_notices();
  if (!control_.empty()) add(std::exchange(control_, {}), {});
  while (batch_bytes_ < kChunkBytes && iov_.size() < kMaxBatchParts) {
    Transfer* const transfer = next_transfer();
    if (transfer == nullptr) break;
    add_frame(*transfer);
  }
  return !iov_.empty();
}

void Outbox::finish_batch() {
  for (const Transfer* transfer : batch_done_) {
    if (transfer->served()) {
      served_.erase(transfer->id);
    } else {
      puts_.erase(transfer->id);
    }
  }
  batch_done_.clear();
  iov_.clear();
  tags_.clear();
  texts_.clear();
  cursor_ = 0;
  batch_bytes_ = 0;
}

// Pulls whose window was withdrawn meanwhile. Called with the windows held.
void Outbox::drop_withdrawn() {
  std::vector<uint64_t> gone;
  for (const auto& [id, transfer] : served_) {
    if (transfer.window->region == nullptr) gone.push_back(id);
  }
  for (const uint64_t id : gone) {
    stop_serving(id);
    control_ += encode_ack(id, Status::kStale, "the window was withdrawn");
  }
}

Outbox::Written Outbox::write(int socket) {
  for (uint64_t sent = 0; sent < kShareBytes;) {
    if (cursor_ == iov_.size()) {
      finish_batch();
      if (!fill()) return Written::kAll;
    }
    std::unique_lock<std::mutex> touching;
    if (!served_.empty()) {
      touching = std::unique_lock(windows_.touching());
      drop_withdrawn();
      if (cursor_ == iov_.size()) continue;
    }
    msghdr message{};
    message.msg_iov = iov_.data() + cursor_;
    message.msg_iovlen = std::min<size_t>(iov_.size() - cursor_, IOV_MAX);
    size_t asked = 0;
    for (size_t i = 0; i < message.msg_iovlen; ++i) asked += message.msg_iov[i].iov_len;
    const ssize_t result = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Written::kBlocked;
      throw LinkError("the connection broke: " + error_text(errno));
    }
    auto left = static_cast<size_t>(result);
    sent += left;
    while (left > 0) {
      iovec& part = iov_[cursor_];
      const size_t taken = std::min(left, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      tags_[cursor_].begun = true;
      left -= taken;
      if (part.iov_len == 0) ++cursor_;
    }
    if (static_cast<size_t>(result) < asked) return Written::kBlocked;
  }
  return Written::kMore;
}

}  // namespace psrl::link::tcp
