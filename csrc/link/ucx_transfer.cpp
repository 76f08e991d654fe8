// One-sided copies in chunks: a few in flight for each peer, then a flush.
#ifdef PSRL_WITH_UCX

#include "link/ucx_endpoint.h"

namespace psrl::link::ucx {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kBytesInFlight = 4 << 20;  // of one peer
constexpr unsigned kChunksInFlight = 64;      // of one transfer

// One request of UCX.
struct Chunk {
  Transfer* transfer;
  uint64_t length;     // 0: a flush
  std::string header;  // of a message
};

}  // namespace

// Null: UCX cannot read the key.
Transfer* UcxEndpoint::begin_transfer(Peer& peer, std::unique_ptr<Transfer> transfer,
                                      std::string_view key) {
  if (!by_message_ && ucx_.ucp_ep_rkey_unpack(peer.ep, key.data(), &transfer->key) != UCS_OK) {
    return nullptr;
  }
  transfer->endpoint = this;
  transfer->peer = &peer;
  Transfer* started = transfer.get();
  peer.transfers.emplace(started, std::move(transfer));
  peer.sending.push_back(started);
  return started;
}

// Sends no more of it; it ends when what is under way has arrived.
void UcxEndpoint::stop_transfer(Transfer& transfer, Status status, const std::string& text) {
  if (transfer.stopped != Status::kOk) return;
  transfer.stopped = status;
  transfer.text = text;
  note(&transfer);
}

// Sends what may be in flight, oldest first.
void UcxEndpoint::pump(Peer& peer) {
  while (!peer.sending.empty() && !peer.cut && !peer.broken) {
    Transfer& transfer = *peer.sending.front();
    while (!transfer.sent()) {
      if (peer.bytes_in_flight >= kBytesInFlight || transfer.in_flight >= kChunksInFlight) return;
      if (!post_chunk(transfer)) return;
    }
    peer.sending.pop_front();
    note(&transfer);
  }
}

bool UcxEndpoint::post_chunk(Transfer& transfer) {
  Peer& peer = *transfer.peer;
  const Piece& piece = transfer.pieces[transfer.piece];
  const uint64_t length = std::min(kChunkBytes, piece.length - transfer.at);
  const uint64_t remote_offset = piece.remote_offset + transfer.at;
  const uint64_t remote = transfer.remote + remote_offset;
  const uint64_t offset = piece.local_offset + transfer.at;
  auto* chunk = new Chunk{&transfer, length, {}};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxEndpoint::on_chunk_sent;
  param.user_data = chunk;
  transfer.in_flight += 1;
  peer.bytes_in_flight += length;
  ucs_status_ptr_t request = nullptr;
  if (by_message_) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    chunk->header = encode({.kind = Kind::kChunk,
                            .access = transfer.served ? WindowAccess::kPull : WindowAccess::kPut,
                            .op = transfer.op,
                            .base = remote_offset});
    request = ucx_.ucp_am_send_nbx(peer.ep, 0, chunk->header.data(), chunk->header.size(),
                                   transfer.region->read(offset, length), length, &param);
  } else {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = transfer.region->memory;
    request = transfer.get ? ucx_.ucp_get_nbx(peer.ep, transfer.region->write(offset, length),
                                              length, remote, transfer.key, &param)
                           : ucx_.ucp_put_nbx(peer.ep, transfer.region->read(offset, length),
                                              length, remote, transfer.key, &param);
  }
  transfer.at += length;
  if (transfer.at == piece.length) {
    transfer.piece += 1;
    transfer.at = 0;
  }
  if (!UCS_PTR_IS_PTR(request)) on_chunk_sent(nullptr, UCS_PTR_STATUS(request), chunk);
  return !peer.broken;
}

// UCX's callback, and ours for what ended at once.
void UcxEndpoint::on_chunk_sent(void* request, ucs_status_t status, void* user_data) {
  const std::unique_ptr<Chunk> chunk(static_cast<Chunk*>(user_data));
  Transfer& transfer = *chunk->transfer;
  UcxEndpoint& self = *transfer.endpoint;
  if (request != nullptr) self.ucx_.ucp_request_free(request);
  transfer.in_flight -= 1;
  transfer.peer->bytes_in_flight -= chunk->length;
  if (status != UCS_OK) self.break_peer(*transfer.peer, status);
  self.note(&transfer);
}

void UcxEndpoint::note(Transfer* transfer) {
  if (std::exchange(transfer->noted, true)) return;
  progressed_.push_back(transfer);
}

void UcxEndpoint::settle(Transfer& transfer) {
  Peer& peer = *transfer.peer;
  if (peer.cut || peer.broken) return;  // reap() ends it
  pump(peer);
  if (!transfer.sent()) return;
  if (!transfer.get && !by_message_ && !transfer.flushed) {
    // Behind all its chunks; not a fence, which spins.
    transfer.flushed = true;
    transfer.in_flight += 1;
    auto* chunk = new Chunk{&transfer, 0, {}};
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &UcxEndpoint::on_chunk_sent;
    param.user_data = chunk;
    const auto request = ucx_.ucp_ep_flush_nbx(peer.ep, &param);
    if (!UCS_PTR_IS_PTR(request)) on_chunk_sent(nullptr, UCS_PTR_STATUS(request), chunk);
    return;
  }
  if (transfer.in_flight == 0) end_transfer(transfer);
}

// UCX holds nothing of it any more.
void UcxEndpoint::end_transfer(Transfer& transfer) {
  Peer& peer = *transfer.peer;
  if (transfer.key != nullptr) ucx_.ucp_rkey_destroy(transfer.key);
  std::erase(peer.sending, &transfer);
  if (transfer.noted) std::erase(progressed_, &transfer);
  const auto ended = std::move(peer.transfers.extract(&transfer).mapped());
  if (ended->served) {
    if (ended->stopped == Status::kOk) peer.counters.bytes_put += ended->bytes;
    if (!peer.cut) answer(peer, ended->op, ended->stopped, ended->text);
    return;
  }
  const auto found = peer.ops.find(ended->op);
  if (found == peer.ops.end()) return;
  const auto op = found->second;
  op->transfer = nullptr;
  if (peer.cut) return;  // reap() ends the operations
  if (ended->stopped != Status::kOk) {
    send(peer, {.kind = Kind::kAbort, .op = op->id});
    return end(peer, op->id, ended->stopped, ended->text);
  }
  Message message{.kind = Kind::kEnd,
                  .access = ended->get ? WindowAccess::kPull : WindowAccess::kPut,
                  .op = op->id,
                  .base = op->bytes,
                  .text = op->notice};
  send(peer, message);
  op->finishing = true;
  if (ended->get) end(peer, op->id, Status::kOk, {});
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
