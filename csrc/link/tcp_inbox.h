// What one connection receives: frames to a handler, payloads straight into memory.
//
// Headers and bodies come through a small buffer. A payload is read by the kernel into where the
// handler says it belongs, in the same call that reads ahead a little for the next header; what
// belongs nowhere is read and forgotten.
#pragma once

#include <sys/uio.h>

#include <mutex>
#include <string_view>
#include <vector>

#include "link/frame.h"
#include "link/tcp_windows.h"

namespace psrl::link::tcp {

class Inbox {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    // A header and its whole body. If it has a payload, receive_into() says where it goes, else it
    // is forgotten. Raises LinkError for what breaks the protocol.
    virtual void on_frame(const FrameHeader& header, std::string_view body) = 0;
    // The window that the payload of frame `id` went into was withdrawn; the rest is forgotten.
    virtual void on_cut(uint64_t id) = 0;
  };

  explicit Inbox(WindowTable& windows);

  enum class Got { kDry, kMore, kEnd };  // no more for now; go on; the peer hung up
  // Reads once and handles what came. Raises LinkError, also when the connection is broken.
  Got read(int socket, Handler& handler);

  // Instead of frames, while there is a handshake: reads into the buffer, which holds little.
  Got read_raw(int socket);
  std::string_view raw() const { return {buffer_.data() + begin_, end_ - begin_}; }
  void consume(size_t bytes) { begin_ += bytes; }
  // After the handshake: what is in the buffer already may be frames.
  void parse(Handler& handler);

  // `window` (null: memory of our own) is held while its memory is written.
  void receive_into(std::vector<iovec> parts, WindowPtr window);
  // Stop writing what is under way, if it is a payload of frame `id` of that type.
  void forget(FrameType type, uint64_t id);
  bool complete() const { return !in_payload_ && begin_ == end_; }  // at a frame's boundary
  uint64_t payload_bytes() const { return payload_bytes_; }

 private:
  void make_room(size_t bytes);
  void advance(size_t bytes);
  // Holds the windows if the payload goes into one; cuts it off if that was withdrawn.
  std::unique_lock<std::mutex> hold_window(Handler& handler);

  WindowTable& windows_;
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;  // what was read and not used yet

  bool in_payload_ = false;
  FrameHeader header_;
  uint64_t left_ = 0;  // of the payload
  bool forgotten_ = false;
  std::vector<iovec> parts_;
  size_t part_ = 0;
  WindowPtr window_;
  uint64_t payload_bytes_ = 0;
};

}  // namespace psrl::link::tcp
