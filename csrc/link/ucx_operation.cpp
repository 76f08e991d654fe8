// What this side asks of its peers, from start to end.
#ifdef PSRL_WITH_UCX

#include <cstring>

#include "link/ucx_endpoint.h"

namespace psrl::link::ucx {
namespace {

using namespace std::chrono_literals;

// How long an operation that is over its deadline may take to get its memory back from UCX before
// the connection is cut.
constexpr auto kDrainGrace = 200ms;

// The smallest range of the window that has all pieces.
Piece hull(const std::vector<Piece>& pieces) {
  if (pieces.empty()) return {};
  uint64_t low = UINT64_MAX, high = 0;
  for (const auto& piece : pieces) {
    low = std::min(low, piece.remote_offset);
    high = std::max(high, piece.remote_offset + piece.length);
  }
  return {.local_offset = 0, .remote_offset = low, .length = high - low};
}

bool inside(const std::vector<Piece>& pieces, uint64_t length) {
  for (const auto& piece : pieces) {
    if (piece.remote_offset > length || piece.length > length - piece.remote_offset) return false;
  }
  return true;
}

}  // namespace

void UcxEndpoint::start(const std::shared_ptr<Operation>& op) {
  if (op->kind == OpKind::kConnect) return start_connect(op);
  Peer* peer = find_peer(op->peer);
  if (peer == nullptr || peer->cut || peer->broken || peer->leaving || peer->goodbye_heard) {
    const bool ours = peer != nullptr && peer->leaving;
    emit({Event::Kind::kDone, op->peer, op->id, ours ? Status::kClosed : Status::kPeerLost,
          peer == nullptr ? "no such peer" : "the connection to " + peer->name + " is ending"},
         op->sink);
    return;
  }
  if (op->deadline <= Clock::now()) {
    emit({Event::Kind::kDone, op->peer, op->id, Status::kTimeout, "begun after its deadline"},
         op->sink);
    return;
  }
  peer->ops.emplace(op->id, op);
  set_timer(op->deadline, peer->id, op->id);
  switch (op->kind) {
    case OpKind::kPut:
      peer->puts.insert(op->id);
      start_put(*peer, *op);
      break;
    case OpKind::kPull:
      start_pull(*peer, *op);
      break;
    case OpKind::kNotify:
      peer->puts.insert(op->id);
      [[fallthrough]];
    default:
      peer->waiting.insert(op->id);
      run_waiting(*peer);
  }
}

void UcxEndpoint::start_put(Peer& peer, Operation& op) {
  if (op.advert.access != WindowAccess::kPut || !inside(op.pieces, op.advert.length)) {
    return end(peer, op.id, Status::kRefused, "outside of what was advertised for puts");
  }
  Message message{.kind = Kind::kData,
                  .access = WindowAccess::kPut,
                  .op = op.id,
                  .window = op.advert.window,
                  .generation = op.advert.generation};
  if (op.bytes > kInlineBytes || op.pieces.size() > kInlinePieces) {
    message.kind = Kind::kAsk;
    message.pieces = {hull(op.pieces)};
    op.asked = true;
    return send(peer, message);
  }
  std::string payload;
  payload.reserve(op.bytes);
  for (const auto& piece : op.pieces) {
    const auto* bytes = op.region->read(piece.local_offset, piece.length);
    payload.append(reinterpret_cast<const char*>(bytes), piece.length);
  }
  message.text = op.notice;
  message.pieces = op.pieces;
  send(peer, message, payload);
}

void UcxEndpoint::start_pull(Peer& peer, Operation& op) {
  if (op.advert.access != WindowAccess::kPull || !inside(op.pieces, op.advert.length)) {
    return end(peer, op.id, Status::kRefused, "outside of what was advertised for pulls");
  }
  Message message{.kind = Kind::kPull,
                  .access = WindowAccess::kPull,
                  .op = op.id,
                  .window = op.advert.window,
                  .generation = op.advert.generation};
  const bool small = op.bytes <= kInlineBytes && op.pieces.size() <= kInlinePieces;
  if (!small && peer.rdma) {
    message.kind = Kind::kAsk;
    message.pieces = {hull(op.pieces)};
    op.asked = true;
    return send(peer, message);
  }
  message.pieces = op.pieces;
  if (!small) {
    message.base = reinterpret_cast<uint64_t>(op.region->const_bytes.data());
    message.key = op.region->key;
    op.remote_writes = true;
  }
  send(peer, message);
}

// Notices go when everything that was put before them has ended; flushes end when all before has.
void UcxEndpoint::run_waiting(Peer& peer) {
  if (peer.running_waiting || peer.cut) return;  // ending one lets the next go
  peer.running_waiting = true;
  for (auto at = peer.waiting.begin(); at != peer.waiting.end();) {
    const OpId id = *at;
    const auto op = peer.ops.at(id);
    const bool notify = op->kind == OpKind::kNotify;
    if (notify ? *peer.puts.begin() != id : peer.ops.begin()->first != id) {
      ++at;
      continue;
    }
    at = peer.waiting.erase(at);
    if (notify) {
      send(peer, {.kind = Kind::kNotice, .op = id, .text = op->notice});
    } else {
      end(peer, id, Status::kOk, {});
      at = peer.waiting.begin();
    }
  }
  peer.running_waiting = false;
}

void UcxEndpoint::on_verdict(Peer& peer, const Message& message, std::string_view payload) {
  const auto found = peer.ops.find(message.op);
  if (found == peer.ops.end()) return;  // given up since
  const auto op = found->second;
  if (op->ending != Status::kOk) {  // the peer stopped, or had done it already
    if (op->transfer == nullptr) end(peer, op->id, op->ending, op->text);
    return;
  }
  if (message.status != Status::kOk) return end(peer, op->id, message.status, message.text);
  if (op->asked && !op->finishing) return get_or_put(peer, *op);
  if (message.kind == Kind::kPiece) {
    if (payload.size() != op->bytes) {
      return cut(peer, Status::kPeerLost, Status::kPeerLost, "it answered a pull with other bytes");
    }
    for (const auto& piece : op->pieces) {
      std::memcpy(op->region->write(piece.local_offset, piece.length), payload.data(),
                  piece.length);
      payload.remove_prefix(piece.length);
    }
  }
  end(peer, op->id, Status::kOk, {});
}

// The window's owner lets us.
void UcxEndpoint::get_or_put(Peer& peer, Operation& op) {
  auto transfer = std::make_unique<Transfer>();
  transfer->get = op.kind == OpKind::kPull;
  transfer->op = op.id;
  transfer->region = op.region;
  transfer->pieces = op.pieces;
  const std::string_view key = op.advert.key;
  if (key.size() > sizeof(uint64_t)) {
    std::memcpy(&transfer->remote, key.data(), sizeof(uint64_t));
    op.transfer = begin_transfer(peer, std::move(transfer), key.substr(sizeof(uint64_t)));
  }
  if (op.transfer == nullptr) {
    send(peer, {.kind = Kind::kAbort, .op = op.id});
    end(peer, op.id, Status::kRefused, "UCX cannot use the advert's key");
  } else {
    pump(peer);
  }
}

// Ends the operation with this status as soon as nothing touches its memory: mostly at once. At
// `until` the connection is cut.
void UcxEndpoint::give_up(Peer& peer, Operation& op, Status status, const std::string& text,
                          Deadline until) {
  if (op.transfer == nullptr && !op.remote_writes) {
    if (op.kind == OpKind::kConnect) return cut(peer, status, status, text);
    if (op.asked) send(peer, {.kind = Kind::kAbort, .op = op.id});
    return end(peer, op.id, status, text);
  }
  op.ending = status;
  op.text = text;
  clear_timer(op.deadline, peer.id, op.id);
  op.deadline = until;
  set_timer(op.deadline, peer.id, op.id);
  if (op.transfer != nullptr) {
    stop_transfer(*op.transfer, status, text);
  } else {
    send(peer, {.kind = Kind::kCancel, .op = op.id});
  }
}

void UcxEndpoint::on_op_timer(Peer& peer, Operation& op) {
  if (op.ending == Status::kOk) {
    const bool connecting = op.kind == OpKind::kConnect;
    return give_up(
        peer, op, Status::kTimeout,
        connecting ? op.address + " did not answer in time" : peer.name + " was not done in time",
        Clock::now() + kDrainGrace);
  }
  cut(peer, Status::kPeerLost, Status::kPeerLost,
      "bytes of an operation that was over were still under way");
}

void UcxEndpoint::end(Peer& peer, OpId id, Status status, const std::string& text) {
  const auto found = peer.ops.find(id);
  if (found == peer.ops.end()) return;
  const auto op = found->second;
  peer.ops.erase(found);
  peer.puts.erase(id);
  if (!peer.running_waiting) peer.waiting.erase(id);
  clear_timer(op->deadline, peer.id, id);
  auto& counters = peer.counters;
  if (status != Status::kOk) {
    counters.failures += 1;
  } else if (op->kind == OpKind::kPut) {
    counters.puts += 1;
    counters.bytes_put += op->bytes;
  } else if (op->kind == OpKind::kPull) {
    counters.pulls += 1;
    counters.bytes_received += op->bytes;
  }
  emit({Event::Kind::kDone, peer.id, id, status, text}, op->sink);
  run_waiting(peer);
  say_goodbye_if_done(peer);
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
