// What one connection has still to send, and in which order.
//
// Control frames (acknowledgements, requests, notices) go first, at the next frame's boundary. Data
// goes in frames of at most kChunkBytes, straight from its region: small transfers and large ones
// take turns, and of the large ones two at a time, so that nothing waits for the end of something
// big and a sequence of large ones still arrives in sequence.
//
// A transfer that is dropped in the middle of a frame is padded with zeros up to the frame's end:
// the stream keeps its place, the memory is not touched any more, and the peer is told not to
// count it.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "link/frame.h"
#include "link/tcp_op.h"
#include "link/tcp_windows.h"

namespace psrl::link::tcp {

inline constexpr uint64_t kChunkBytes = 1 << 20;
static_assert(kChunkBytes <= kMaxPayloadBytes);
// Puts and notices on their way or unacknowledged; more wait here. Bounds what a peer has to
// remember to acknowledge.
inline constexpr size_t kMaxInFlight = 1024;

class Outbox {
 public:
  explicit Outbox(WindowTable& windows) : windows_(windows) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Bytes of whole frames (or of the handshake) that are not data.
  void control(std::string_view bytes) { control_ += bytes; }
  // A put or a notice of ours, in the order of their numbers. It stays where it is until ended().
  void submit(const Op& op);
  // It ended, in whatever way: its memory is left alone from now on, and the peer told if it must
  // be.
  void ended(OpId id);
  // Pull `id` of the peer: sends the ranges, then the acknowledgement.
  void serve(uint64_t id, WindowPtr window, std::vector<Range> ranges);
  void stop_serving(uint64_t id);
  size_t num_served() const { return served_.size(); }
  bool serves(uint64_t id) const { return served_.contains(id); }
  // A put or notice of ours that is not wholly in frames.
  bool unsent(OpId id) const {
    return unframed_puts_.contains(id) || notices_.contains(id) || waiting_.contains(id);
  }

  size_t control_bytes() const { return control_.size(); }
  bool idle() const { return control_.empty() && cursor_ == iov_.size() && lanes_empty(); }
  uint64_t data_bytes() const { return data_bytes_; }

  enum class Written { kAll, kBlocked, kMore };
  // Sends until the socket takes no more, all is sent, or its share of time is used up. Raises
  // LinkError when the connection is broken.
  Written write(int socket);

 private:
  // A put of ours, or the answer to a pull of the peer.
  struct Transfer {
    uint64_t id = 0;
    const Op* put = nullptr;
    WindowPtr window;
    std::vector<Range> ranges;
    uint64_t total = 0;     // bytes of all
    uint64_t position = 0;  // of the next byte that is not in a frame yet
    size_t index = 0;       // ... in which piece or range, and where in it
    uint64_t within = 0;
    bool served() const { return put == nullptr; }
    size_t num_parts() const { return served() ? ranges.size() : put->pieces.size(); }
  };
  enum class Kind : uint8_t { kControl, kHead, kPayload, kTail };
  struct Tag {
    Kind kind = Kind::kControl;
    const Transfer* transfer = nullptr;
    bool begun = false;  // some of it was sent
  };

  bool lanes_empty() const {
    return small_.empty() && large_.empty() && notices_.empty() && waiting_.empty();
  }
  void admit(const Op& op);
  void start(Transfer& transfer);
  void drop(Transfer& transfer);
  bool fill();
  void take_notices();
  Transfer* next_transfer();
  void add_frame(Transfer& transfer);
  void add(std::string bytes, Tag tag);
  void drop_withdrawn();
  void finish_batch();

  WindowTable& windows_;
  std::string control_;
  std::map<OpId, const Op*> waiting_;   // not admitted yet
  std::unordered_set<OpId> in_flight_;  // admitted, not ended
  std::map<OpId, const Op*> notices_;   // admitted, wait for earlier puts to be in frames
  std::map<OpId, Transfer> puts_;       // until their last byte is sent
  std::set<OpId> unframed_puts_;
  std::map<uint64_t, Transfer> served_;
  std::deque<Transfer*> small_, large_;  // not wholly in frames yet
  bool small_turn_ = true;
  size_t large_turn_ = 0;

  // The batch under way: one sendmsg, or several when the socket is full.
  std::vector<iovec> iov_;
  std::vector<Tag> tags_;  // of each iovec
  size_t cursor_ = 0;      // the first that is not wholly sent
  std::deque<std::string> texts_;
  uint64_t batch_bytes_ = 0;
  std::vector<Transfer*> batch_done_;  // end with this batch
  uint64_t data_bytes_ = 0;
};

}  // namespace psrl::link::tcp
