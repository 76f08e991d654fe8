#include "link/tcp_pulls.h"

#include <algorithm>

#include "base/errors.h"

namespace psrl::link::tcp {

void Pulls::submit(const Op& op) {
  pulls_[op.id].op = &op;
  turns_.push_back(op.id);
  ask();
}

void Pulls::ask() {
  while (requests_.size() < kMaxRequests && !turns_.empty()) {
    const OpId id = turns_.front();
    turns_.pop_front();
    Pull& pull = pulls_.at(id);
    Request request{id, pull.asked, 0, 0, 0};
    std::vector<Range> ranges;
    while (pull.asked < pull.op->pieces.size() && ranges.size() < kMaxRanges) {
      const Piece& piece = pull.op->pieces[pull.asked++];
      ranges.push_back({piece.remote_offset, piece.length});
      request.total += piece.length;
    }
    const uint64_t number = kRequestBit | next_++;
    outbox_.control(
        encode_ranges(FrameType::kPull, number, pull.op->window, pull.op->generation, ranges));
    requests_.emplace(number, request);
    pull.requests += 1;
    if (pull.asked < pull.op->pieces.size()) turns_.push_back(id);
  }
}

std::vector<uint64_t> Pulls::ended(OpId id) {
  std::vector<uint64_t> cancelled;
  if (pulls_.erase(id) == 0) return cancelled;
  std::erase(turns_, id);
  std::erase_if(requests_, [&](const auto& entry) {
    if (entry.second.id != id) return false;
    cancelled.push_back(entry.first);
    return true;
  });
  for (const uint64_t request : cancelled) {
    outbox_.control(encode_empty(FrameType::kCancel, request));
  }
  ask();
  return cancelled;
}

std::vector<iovec> Pulls::receive(uint64_t number, uint64_t position, uint64_t length) {
  std::vector<iovec> parts;
  const auto found = requests_.find(number);
  if (found == requests_.end()) return parts;
  Request& request = found->second;
  if (position != request.position || length > request.total - request.position) {
    throw LinkError("bytes of a pull came out of order");
  }
  request.position += length;
  const Op& op = *pulls_.at(request.id).op;
  while (length > 0) {
    const Piece& piece = op.pieces[request.piece];
    const uint64_t taken = std::min(length, piece.length - request.within);
    parts.push_back({op.region->bytes.data() + piece.local_offset + request.within, taken});
    length -= taken;
    request.within += taken;
    if (request.within == piece.length) {
      request.piece += 1;
      request.within = 0;
    }
  }
  return parts;
}

std::optional<Pulls::Ended> Pulls::acknowledged(uint64_t number, Status status,
                                                std::string_view why) {
  const auto found = requests_.find(number);
  if (found == requests_.end()) return std::nullopt;
  const Request request = found->second;
  if (status == Status::kOk && request.position != request.total) {
    throw LinkError("a pull was acknowledged before its bytes came");
  }
  requests_.erase(found);
  Pull& pull = pulls_.at(request.id);
  pull.requests -= 1;
  ask();
  if (status != Status::kOk) return Ended{request.id, status, std::string(why)};
  if (pull.requests == 0 && pull.asked == pull.op->pieces.size()) {
    return Ended{request.id, Status::kOk, {}};
  }
  return std::nullopt;
}

}  // namespace psrl::link::tcp
