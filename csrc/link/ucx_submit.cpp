#ifdef PSRL_WITH_UCX

#include "link/ucx_endpoint.h"

#include <sys/eventfd.h>

#include "base/errors.h"
#include "link/ucx_address.h"

namespace psrl::link::ucx {
namespace {

uint64_t total(std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.length;
  return bytes;
}

void check_notice(std::string_view notice) {
  if (notice.size() > kMaxNoticeBytes) {
    throw LinkError("a notice of " + std::to_string(notice.size()) + " bytes; " +
                    std::to_string(kMaxNoticeBytes) + " is the limit");
  }
}

std::vector<Piece> without_empty(std::span<const Piece> pieces) {
  std::vector<Piece> kept;
  kept.reserve(pieces.size());
  for (const auto& piece : pieces) {
    if (piece.length > 0) kept.push_back(piece);
  }
  return kept;
}

}  // namespace

OpId UcxEndpoint::connect(const std::string& address, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kConnect;
  op->deadline = deadline;
  op->sink = sink;
  op->address = address;
  std::string host, port;
  if (!address.starts_with("ucx:") || !split(address.substr(4), &host, &port)) {
    throw LinkError("not an address of a ucx endpoint: " + address + " (as ucx:10.77.0.1:4712)");
  }
  if (!resolve(host, port, false, &op->where, &op->num_where)) op->num_where = 0;
  return submit(std::move(op));
}

OpId UcxEndpoint::put(PeerId peer, const Advert& into, const RegionPtr& from,
                      std::span<const Piece> pieces, std::string_view notice, Deadline deadline,
                      EventSink* sink) {
  check_notice(notice);
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kPut;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->advert = into;
  op->region = known(from);
  op->pieces = without_empty(pieces);
  op->bytes = total(pieces);
  op->notice = notice;
  for (const auto& piece : pieces) from->read(piece.local_offset, piece.length);
  return submit(std::move(op));
}

OpId UcxEndpoint::pull(PeerId peer, const Advert& from, const RegionPtr& into,
                       std::span<const Piece> pieces, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kPull;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->advert = from;
  op->region = known(into);
  op->pieces = without_empty(pieces);
  op->bytes = total(pieces);
  for (const auto& piece : pieces) into->write(piece.local_offset, piece.length);
  return submit(std::move(op));
}

OpId UcxEndpoint::notify(PeerId peer, std::string_view notice, Deadline deadline, EventSink* sink) {
  check_notice(notice);
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kNotify;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  op->notice = notice;
  return submit(std::move(op));
}

OpId UcxEndpoint::flush(PeerId peer, Deadline deadline, EventSink* sink) {
  auto op = std::make_shared<Operation>();
  op->kind = OpKind::kFlush;
  op->peer = peer;
  op->deadline = deadline;
  op->sink = sink;
  return submit(std::move(op));
}

OpId UcxEndpoint::submit(std::shared_ptr<Operation> op) {
  std::unique_lock lock(mutex_);
  const OpId id = op->id = next_op_++;
  if (running_ && !closing_) {
    tasks_.push_back([this, op = std::move(op)] { start(op); });
    lock.unlock();
    wake();
    return id;
  }
  const Event event{Event::Kind::kDone, op->peer, id, Status::kClosed, "the endpoint is closed"};
  if (running_) {
    tasks_.push_back([this, event, sink = op->sink] { emit(event, sink); });
    lock.unlock();
    wake();
  } else if (op->sink != nullptr) {
    lock.unlock();
    op->sink->on_event(event);
  } else {
    events_.push_back(event);
    ::eventfd_write(events_fd_.get(), 1);
  }
  return id;
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
