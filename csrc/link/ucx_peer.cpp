// Peers: how connections begin and end, and messages on them.
#ifdef PSRL_WITH_UCX

#include <netdb.h>

#include <cstdio>
#include <cstdlib>

#include "base/errors.h"
#include "link/ucx_endpoint.h"

namespace psrl::link::ucx {
namespace {

using namespace std::chrono_literals;

constexpr auto kHelloWithin = 60s;  // so that nobody stays for ever; who connects has a deadline
constexpr auto kLinger = 1s;        // for the other side to hang up after both said goodbye

// A message under way, or a note that a connection's last flush or its closing ended.
struct Outgoing {
  UcxEndpoint* endpoint;
  PeerId peer;
  std::string bytes = {};
};

std::string text_of(const sockaddr_storage& where) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  const socklen_t size = where.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&where), size, host, sizeof(host), port,
                    sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return std::string(host) + ":" + port;
}

// True gets where transports are RDMA; PSRL_UCX_GET=0 or 1 decides otherwise, for tests.
bool gets_over(const std::string& transports) {
  if (const char* choice = std::getenv("PSRL_UCX_GET")) return std::string_view(choice) == "1";
  for (const char* rdma : {"rc_", "dc_", "gga_"}) {
    if (transports.starts_with(rdma) ||
        transports.find(std::string(", ") + rdma) != transports.npos) {
      return true;
    }
  }
  return false;
}

}  // namespace

Peer& UcxEndpoint::add_peer(bool incoming) {
  auto peer = std::make_unique<Peer>();
  peer->id = next_peer_++;
  peer->incoming = incoming;
  Peer& added = *peer;
  peers_.emplace(added.id, std::move(peer));
  return added;
}

Peer* UcxEndpoint::find_peer(PeerId id) {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second.get();
}

void UcxEndpoint::set_peer_timer(Peer& peer, Deadline deadline) {
  clear_timer(peer.timer, peer.id, 0);
  peer.timer = deadline;
  set_timer(deadline, peer.id, 0);
}

// ---------------------------------------------------------------- beginning

ucp_ep_params_t UcxEndpoint::peer_params() {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxEndpoint::on_error;
  params.err_handler.arg = this;
  return params;
}

void UcxEndpoint::start_connect(const std::shared_ptr<Operation>& op) {
  const auto failed = [&](const std::string& why) {
    emit({Event::Kind::kDone, 0, op->id, Status::kPeerLost, why}, op->sink);
  };
  if (op->num_where == 0) return failed("cannot connect to " + op->address + ": no such host");
  if (op->deadline <= Clock::now()) {
    emit({Event::Kind::kDone, 0, op->id, Status::kTimeout, "begun after its deadline"}, op->sink);
    return;
  }
  ucp_ep_params_t params = peer_params();
  params.field_mask |= UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_FLAGS;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&op->where);
  params.sockaddr.addrlen = op->num_where;
  ucp_ep_h ep = nullptr;
  const auto status = ucx_.ucp_ep_create(worker_, &params, &ep);
  if (status != UCS_OK) {
    return failed("cannot connect to " + op->address + ": " + ucx_.ucs_status_string(status));
  }
  Peer& peer = add_peer(false);
  peer.ep = ep;
  peer.address = op->address;
  peer.name = op->address;  // until it says
  peer.connect_op = op->id;
  peer.ops.emplace(op->id, op);
  peer_of_[ep] = peer.id;
  set_timer(op->deadline, peer.id, op->id);
  send(peer, {.kind = Kind::kHello, .text = name_});
}

void UcxEndpoint::on_connection(ucp_conn_request_h request, void* arg) {
  static_cast<UcxEndpoint*>(arg)->requests_.push_back(request);
}

void UcxEndpoint::accept(ucp_conn_request_h request) {
  if (leaving_) {
    ucx_.ucp_listener_reject(listener_, request);
    return;
  }
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  const bool told = ucx_.ucp_conn_request_query(request, &attributes) == UCS_OK;
  ucp_ep_params_t params = peer_params();
  params.field_mask |= UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  ucp_ep_h ep = nullptr;
  if (ucx_.ucp_ep_create(worker_, &params, &ep) != UCS_OK) return;  // the other side is told
  Peer& peer = add_peer(true);
  peer.ep = ep;
  peer.address = told ? "ucx:" + text_of(attributes.client_address) : "ucx:?";
  peer.name = peer.address;
  peer_of_[ep] = peer.id;
  set_peer_timer(peer, Clock::now() + kHelloWithin);
}

void UcxEndpoint::on_hello(Peer& peer, const Message& message) {
  if (!peer.incoming || peer.up) throw LinkError("a second hello");
  send(peer, {.kind = Kind::kWelcome, .text = name_});
  be_up(peer, message.text);
  emit({Event::Kind::kPeerConnected, peer.id, 0, Status::kOk, peer.name});
}

void UcxEndpoint::on_welcome(Peer& peer, const Message& message) {
  if (peer.incoming || peer.up) throw LinkError("a second welcome");
  if (message.status != Status::kOk) {
    return cut(peer, Status::kRefused, Status::kRefused, peer.address + ": " + message.text);
  }
  be_up(peer, message.text);
  end(peer, peer.connect_op, Status::kOk, peer.name);
}

void UcxEndpoint::be_up(Peer& peer, const std::string& name) {
  peer.up = true;
  peer.name = name;
  peer.counters.name = name;
  peer.counters.address = peer.address;
  set_peer_timer(peer, Deadline::max());
  const auto transports = transports_of(peer);
  peer.rdma = !by_message_ && gets_over(transports);
  const std::lock_guard lock(mutex_);
  transports_ = transports;
}

// As UCX prints them, for example "tcp/eth0, tcp/eth1".
std::string UcxEndpoint::transports_of(const Peer& peer) const {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return {};
  ucx_.ucp_ep_print_info(peer.ep, stream);
  std::fclose(stream);
  const std::string printed(text, size);
  std::free(text);
  std::string found;
  // "#   lane[0]:  1:tcp/eth0.0 md[1]   -> ..."
  for (size_t at = printed.find("lane["); at != printed.npos; at = printed.find("lane[", at + 1)) {
    size_t begin = printed.find("]:", at);
    if (begin == printed.npos) break;
    begin = printed.find(':', begin + 2);  // behind the resource's number
    const size_t end = begin == printed.npos ? begin : printed.find_first_of(". \n", begin);
    if (end == printed.npos) break;
    const auto transport = printed.substr(begin + 1, end - begin - 1);
    if (transport.find('/') == transport.npos || found.find(transport) != found.npos) continue;
    found += (found.empty() ? "" : ", ") + transport;
  }
  return found;
}

// ---------------------------------------------------------------- messages

void UcxEndpoint::send(Peer& peer, const Message& message, std::string_view payload) {
  if (peer.cut || peer.broken) return;
  auto* out = new Outgoing{this, peer.id, encode(message)};
  out->bytes += payload;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &UcxEndpoint::on_sent;
  param.user_data = out;
  const auto request =
      ucx_.ucp_am_send_nbx(peer.ep, 0, nullptr, 0, out->bytes.data(), out->bytes.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) on_sent(nullptr, UCS_PTR_STATUS(request), out);
}

void UcxEndpoint::on_sent(void* request, ucs_status_t status, void* user_data) {
  const std::unique_ptr<Outgoing> out(static_cast<Outgoing*>(user_data));
  UcxEndpoint& self = *out->endpoint;
  if (request != nullptr) self.ucx_.ucp_request_free(request);
  if (Peer* peer = self.find_peer(out->peer); peer != nullptr && status != UCS_OK) {
    self.break_peer(*peer, status);
  }
}

ucs_status_t UcxEndpoint::on_active_message(void* arg, const void* header, size_t num_header,
                                            void* data, size_t size,
                                            const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<UcxEndpoint*>(arg);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0 ||
      (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    return UCS_OK;  // not from one of us
  }
  const auto found = self.peer_of_.find(param->reply_ep);
  if (found == self.peer_of_.end()) return UCS_OK;
  const std::string_view bytes(static_cast<const char*>(data), size);
  if (num_header == 0) {
    self.inbox_.emplace_back(found->second, bytes);
    return UCS_OK;
  }
  // A chunk: its bytes are beside the message, and go where they belong at once.
  Peer& peer = *self.find_peer(found->second);
  if (peer.cut || peer.broken) return UCS_OK;
  try {
    std::string_view rest;
    const Message message = decode({static_cast<const char*>(header), num_header}, &rest);
    if (message.kind != Kind::kChunk) throw LinkError("a message in the wrong place");
    self.on_chunk(peer, message, bytes);
  } catch (const LinkError&) {
    self.break_peer(peer, UCS_ERR_INVALID_PARAM);
  }
  return UCS_OK;
}

void UcxEndpoint::on_message(PeerId id, std::string_view bytes) {
  Peer* peer = find_peer(id);
  if (peer == nullptr || peer->cut) return;
  try {
    std::string_view payload;
    const Message message = decode(bytes, &payload);
    if (!peer->up && message.kind != Kind::kHello && message.kind != Kind::kWelcome) {
      throw LinkError("no hello");
    }
    on_message(*peer, message, payload);
  } catch (const LinkError& error) {
    if (!peer->up && peer->incoming) {  // it may speak another protocol: say so before cutting
      send(*peer, {.kind = Kind::kWelcome, .status = Status::kRefused, .text = error.what()});
      return set_peer_timer(*peer, Clock::now() + kLinger);
    }
    const auto status = peer->up ? Status::kPeerLost : Status::kRefused;
    cut(*peer, status, status, peer->name + " broke the protocol: " + error.what());
  }
}

void UcxEndpoint::on_message(Peer& peer, const Message& message, std::string_view payload) {
  switch (message.kind) {
    case Kind::kHello:
      return on_hello(peer, message);
    case Kind::kWelcome:
      return on_welcome(peer, message);
    case Kind::kAsk:
      return on_ask(peer, message);
    case Kind::kData:
      return on_data(peer, message, payload);
    case Kind::kVerdict:
    case Kind::kPiece:
      return on_verdict(peer, message, payload);
    case Kind::kEnd:
    case Kind::kAbort:
      return on_end(peer, message);
    case Kind::kCut:
      return on_cut(peer, message);
    case Kind::kPull:
      return on_pull(peer, message);
    case Kind::kCancel:
      return on_cancel(peer, message);
    case Kind::kNotice:
      on_notice(peer, message.text);
      return answer(peer, message.op, Status::kOk, {});
    case Kind::kGoodbye:
      return on_goodbye(peer);
    case Kind::kChunk:
      throw LinkError("a chunk in the wrong place");
  }
}

// ---------------------------------------------------------------- ending

// We want no more of this peer: a goodbye when our operations have ended.
void UcxEndpoint::leave(Peer& peer, Deadline by) {
  if (peer.cut) return;
  if (!peer.up) return cut(peer, Status::kClosed, Status::kClosed, "the endpoint is closing");
  peer.leaving = true;
  set_peer_timer(peer, std::min(by, peer.timer));
  say_goodbye_if_done(peer);
}

void UcxEndpoint::say_goodbye_if_done(Peer& peer) {
  if (!peer.up || peer.cut || peer.goodbye_said || !peer.ops.empty()) return;
  if (!peer.leaving && !peer.goodbye_heard) return;
  send(peer, {.kind = Kind::kGoodbye});
  peer.goodbye_said = true;
  // Who hears the other's goodbye last hangs up.
  if (peer.goodbye_heard) set_peer_timer(peer, std::min(peer.timer, Clock::now() + kLinger));
}

void UcxEndpoint::on_goodbye(Peer& peer) {
  peer.goodbye_heard = true;
  if (!peer.goodbye_said) return say_goodbye_if_done(peer);
  // Ours may still be under way, when both were said at the same time.
  auto* out = new Outgoing{this, peer.id};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxEndpoint::on_parted;
  param.user_data = out;
  const auto request = ucx_.ucp_ep_flush_nbx(peer.ep, &param);
  if (!UCS_PTR_IS_PTR(request)) on_parted(nullptr, UCS_PTR_STATUS(request), out);
}

void UcxEndpoint::on_parted(void* request, ucs_status_t, void* user_data) {
  const std::unique_ptr<Outgoing> out(static_cast<Outgoing*>(user_data));
  UcxEndpoint& self = *out->endpoint;
  if (request != nullptr) self.ucx_.ucp_request_free(request);
  if (Peer* peer = self.find_peer(out->peer)) {
    peer->parted = true;
    self.unsettled_.insert(peer->id);
  }
}

void UcxEndpoint::on_error(void* arg, ucp_ep_h ep, ucs_status_t status) {
  auto& self = *static_cast<UcxEndpoint*>(arg);
  const auto found = self.peer_of_.find(ep);
  if (found == self.peer_of_.end()) return;
  if (Peer* peer = self.find_peer(found->second)) self.break_peer(*peer, status);
}

void UcxEndpoint::break_peer(Peer& peer, ucs_status_t status) {
  if (peer.cut || std::exchange(peer.broken, true)) return;
  peer.why = ucx_.ucs_status_string(status);
  unsettled_.insert(peer.id);
}

void UcxEndpoint::on_peer_timer(Peer& peer) {
  peer.timer = Deadline::max();
  if (peer.cut) {
    finish(peer);
  } else if (!peer.up) {
    cut(peer, Status::kRefused, Status::kRefused, "no hello");
  } else {
    cut(peer, Status::kClosed, Status::kClosed, "it did not say goodbye in time");
  }
}

// Ends the connection at once. Its operations end when UCX has let go of their memory.
void UcxEndpoint::cut(Peer& peer, Status lost, Status ops_lost, const std::string& why) {
  if (std::exchange(peer.cut, true)) return;
  peer.lost = lost;
  peer.ops_lost = ops_lost;
  peer.why = why;
  unsettled_.insert(peer.id);
  set_peer_timer(peer, Clock::now() + kReapGrace);
  auto* out = new Outgoing{this, peer.id};
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &UcxEndpoint::on_closed;
  param.user_data = out;
  const auto request = ucx_.ucp_ep_close_nbx(peer.ep, &param);
  if (!UCS_PTR_IS_PTR(request)) on_closed(nullptr, UCS_PTR_STATUS(request), out);
}

void UcxEndpoint::on_closed(void* request, ucs_status_t, void* user_data) {
  const std::unique_ptr<Outgoing> out(static_cast<Outgoing*>(user_data));
  UcxEndpoint& self = *out->endpoint;
  if (request != nullptr) self.ucx_.ucp_request_free(request);
  if (Peer* peer = self.find_peer(out->peer)) {
    peer->closed = true;
    self.peer_of_.erase(peer->ep);
  }
}

void UcxEndpoint::reap() {
  const std::vector<PeerId> ids(unsettled_.begin(), unsettled_.end());
  for (const PeerId id : ids) {
    Peer& peer = *find_peer(id);
    if (!peer.cut && peer.parted) {
      cut(peer, Status::kClosed, Status::kClosed, "goodbye");
    } else if (!peer.cut && peer.goodbye_said && peer.goodbye_heard) {
      cut(peer, Status::kClosed, Status::kClosed, "goodbye");  // it hung up
    } else if (!peer.cut) {
      const auto status = peer.goodbye_said ? Status::kClosed : Status::kPeerLost;
      cut(peer, status, Status::kPeerLost,
          (peer.up ? "lost " + peer.name : "cannot connect to " + peer.address) + ": " + peer.why);
    }
    bool quiet = peer.closed;
    for (const auto& [transfer, _] : peer.transfers) quiet = quiet && transfer->in_flight == 0;
    if (quiet) finish(peer);
  }
}

// The connection is over. Its memory is not touched any more, unless UCX never said so.
void UcxEndpoint::finish(Peer& peer) {
  bool abandoned = !peer.closed;
  std::vector<Transfer*> transfers;
  for (const auto& [transfer, _] : peer.transfers) transfers.push_back(transfer);
  for (Transfer* transfer : transfers) {
    if (transfer->in_flight > 0) {
      abandoned = true;
    } else {
      end_transfer(*transfer);
    }
  }
  const auto ops = peer.ops;
  for (const auto& [id, op] : ops) {
    if (op->ending != Status::kOk) end(peer, id, op->ending, op->text);
  }
  // Flushes that waited for those alone have what they waited for.
  while (!peer.ops.empty() && peer.ops.begin()->second->kind == OpKind::kFlush) {
    end(peer, peer.ops.begin()->first, Status::kOk, {});
  }
  while (!peer.ops.empty()) end(peer, peer.ops.begin()->first, peer.ops_lost, peer.why);
  if (peer.up) {
    emit({Event::Kind::kPeerLost, peer.id, 0, peer.lost, peer.why});
    if (leaving_ && !peer.goodbye_heard) said_goodbye_ = false;
  }
  set_peer_timer(peer, Deadline::max());
  unsettled_.erase(peer.id);
  peer_of_.erase(peer.ep);
  const auto found = peers_.find(peer.id);
  if (abandoned) abandoned_.push_back(std::move(found->second));
  peers_.erase(found);
}

}  // namespace psrl::link::ucx

#endif  // PSRL_WITH_UCX
