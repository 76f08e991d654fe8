// What peers ask of this side: every request is checked against the windows that are open.
#ifdef PSRL_WITH_UCX

#include <cstring>

#include "link/ucx_endpoint.h"

namespace psrl::link::ucx {

void UcxEndpoint::answer(Peer& peer, uint64_t op, Status status, const std::string& text) {
  send(peer, {.kind = Kind::kVerdict, .status = status, .op = op, .text = text});
}

// kOk: the window is open for this access, and all pieces lie in it.
Status UcxEndpoint::find_window(const Message& message, Window* window, std::string* text) const {
  const std::lock_guard lock(memory_mutex_);
  const auto found = windows_.find(message.window);
  if (found == windows_.end() || found->second.generation != message.generation) {
    *text = "the window is not open any more";
    return Status::kStale;
  }
  *window = found->second;
  if (window->access != message.access) {
    *text = "the window is not open for this";
    return Status::kRefused;
  }
  for (const auto& piece : message.pieces) {
    if (piece.remote_offset > window->length ||
        piece.length > window->length - piece.remote_offset) {
      *text = "outside of the window";
      return Status::kRefused;
    }
  }
  return Status::kOk;
}

void UcxEndpoint::on_ask(Peer& peer, const Message& message) {
  Window window;
  std::string text;
  const auto status = find_window(message, &window, &text);
  // Noted on this thread before the answer: withdraw() either finds it or was found here.
  if (status == Status::kOk) peer.grants[message.op] = message.window;
  answer(peer, message.op, status, text);
}

void UcxEndpoint::on_data(Peer& peer, const Message& message, std::string_view payload) {
  Window window;
  std::string text;
  const auto status = find_window(message, &window, &text);
  if (status == Status::kOk) {
    uint64_t bytes = 0;
    for (const auto& piece : message.pieces) {
      if (piece.length > payload.size()) {
        return cut(peer, Status::kPeerLost, Status::kPeerLost, "it sent fewer bytes than it said");
      }
      std::memcpy(window.region->write(window.offset + piece.remote_offset, piece.length),
                  payload.data(), piece.length);
      payload.remove_prefix(piece.length);
      bytes += piece.length;
    }
    peer.counters.bytes_received += bytes;
    if (!message.text.empty()) on_notice(peer, message.text);
  }
  answer(peer, message.op, status, text);
}

void UcxEndpoint::on_pull(Peer& peer, const Message& message) {
  Window window;
  std::string text;
  const auto status = find_window(message, &window, &text);
  if (status != Status::kOk) return answer(peer, message.op, status, text);
  if (message.key.empty()) {  // small
    std::string payload;
    for (const auto& piece : message.pieces) {
      const auto* bytes = window.region->read(window.offset + piece.remote_offset, piece.length);
      payload.append(reinterpret_cast<const char*>(bytes), piece.length);
      if (payload.size() > kInlineBytes) {
        return cut(peer, Status::kPeerLost, Status::kPeerLost, "it pulled too much at once");
      }
    }
    peer.counters.bytes_put += payload.size();
    return send(peer, {.kind = Kind::kPiece, .op = message.op}, payload);
  }
  auto transfer = std::make_unique<Transfer>();
  transfer->served = true;
  transfer->op = message.op;
  transfer->window = message.window;
  transfer->region = window.region;
  transfer->remote = message.base;
  for (const auto& piece : message.pieces) {
    transfer->pieces.push_back({.local_offset = window.offset + piece.remote_offset,
                                .remote_offset = piece.local_offset,
                                .length = piece.length});
    transfer->bytes += piece.length;
  }
  if (begin_transfer(peer, std::move(transfer), message.key) == nullptr) {
    return answer(peer, message.op, Status::kRefused, "UCX cannot use the puller's key");
  }
  pump(peer);
}

void UcxEndpoint::on_end(Peer& peer, const Message& message) {
  const auto found = peer.grants.find(message.op);
  if (found == peer.grants.end()) return;
  if (message.kind == Kind::kEnd) {
    (message.access == WindowAccess::kPut ? peer.counters.bytes_received
                                          : peer.counters.bytes_put) += message.base;
    if (!message.text.empty()) on_notice(peer, message.text);
    answer(peer, message.op, Status::kOk, {});
  }
  peer.grants.erase(found);
}

// Called by UCX's callback, to copy straight from its buffer.
void UcxEndpoint::on_chunk(Peer& peer, const Message& message, std::string_view payload) {
  std::byte* into = nullptr;
  if (message.access == WindowAccess::kPut) {
    const auto grant = peer.grants.find(message.op);
    if (grant == peer.grants.end()) return;
    const std::lock_guard lock(memory_mutex_);
    const auto window = windows_.find(grant->second);
    if (window == windows_.end()) return;  // withdrawn: the peer is told
    const auto& [generation, region, offset, length, access] = window->second;
    if (message.base > length || payload.size() > length - message.base) return;
    into = region->write(offset + message.base, payload.size());
  } else {
    const auto op = peer.ops.find(message.op);
    if (op == peer.ops.end() || !op->second->remote_writes) return;
    into = op->second->region->write(message.base, payload.size());
  }
  std::memcpy(into, payload.data(), payload.size());
}

// The owner withdraws the window that our operation uses.
void UcxEndpoint::on_cut(Peer& peer, const Message& message) {
  const auto found = peer.ops.find(message.op);
  if (found == peer.ops.end() || found->second->transfer == nullptr)
    return;  // its end is on its way
  stop_transfer(*found->second->transfer, Status::kStale, "the window was withdrawn");
}

void UcxEndpoint::on_cancel(Peer& peer, const Message& message) {
  for (auto& [transfer, _] : peer.transfers) {
    if (transfer->served && transfer->op == message.op) {
      return stop_transfer(*transfer, Status::kTimeout, "it was given up");
    }
  }
}

void UcxEndpoint::on_notice(Peer& peer, const std::string& notice) {
  peer.counters.notices += 1;
  emit({Event::Kind::kNotice, peer.id, 0, Status::kOk, notice});
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
