// Passing segments between processes: descriptors over a Unix socket, by name.
//
// The node agent owns one SegmentServer; every process that maps a segment asks it once with
// fetch_segment. Only processes of the same user are answered (SO_PEERCRED, both ways).
//
// Wire: SOCK_SEQPACKET. Request: the name. Reply: one status byte, then an error text if it is 1;
// with status 0 the descriptor rides along (SCM_RIGHTS).
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/fd.h"
#include "shm/segment.h"

namespace psrl {

class SegmentServer {
 public:
  // Binds `path` (at most 107 bytes, must not exist) and answers on a thread of its own.
  explicit SegmentServer(const std::string& path);
  SegmentServer(const SegmentServer&) = delete;
  SegmentServer& operator=(const SegmentServer&) = delete;
  ~SegmentServer();

  // Serves `segment` under its name from now on; replaces one of the same name.
  void add(std::shared_ptr<Segment> segment);

  // Joins the thread, removes the socket, lets go of the segments. Idempotent.
  void close();

 private:
  void serve();
  void answer(int client);

  std::string path_;
  Fd listener_;
  Fd stop_;  // eventfd
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Segment>> segments_;
  std::thread thread_;
};

// Maps the segment `name` of the server at `path`. Waits for the server to appear until the
// timeout. Raises UnknownKey (naming what there is) or StorageError.
std::shared_ptr<Segment> fetch_segment(const std::string& path, const std::string& name,
                                       std::chrono::duration<double> timeout,
                                       Access access = Access::kReadWrite);

}  // namespace psrl
