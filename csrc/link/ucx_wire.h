// Messages between two ucx endpoints: what goes beside the one-sided copies. Bytes from a peer are
// decoded with every length checked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "link/link.h"

namespace psrl::link::ucx {

// Changes with any change of what follows.
inline constexpr uint32_t kProtocol = 1;

enum class Kind : uint8_t {
  kHello = 1,  // connecting side: text = its name
  kWelcome,    // the answer: text = name, or status kRefused and text = why not
  kAsk,        // may `op` put into (or get from) window bytes [pieces[0]]?
  kData,       // a put that is small: pieces of the window and their bytes behind the message
  kVerdict,    // answer to kAsk, kData, kEnd, kPull, kNotice: `op` has this status
  kEnd,        // the granted `op` is done and flushed; text = the notice, if any; then kVerdict
  kChunk,   // bytes of the granted put, or of the pull, `op`: for offset `base`, behind the message
  kAbort,   // the granted `op` was given up; nothing of it is under way any more
  kCut,     // the window of the granted `op` is withdrawn: stop, then kAbort (or kEnd, if done)
  kPull,    // put `pieces` of the window to `base` + local offsets under `key`, then kVerdict
  kPiece,   // answer to a pull that is small: its bytes behind the message
  kCancel,  // stop the pull `op`, then kVerdict
  kNotice,  // text, then kVerdict
  kGoodbye,  // no more operations from here
};

struct Message {
  Kind kind = Kind::kHello;
  Status status = Status::kOk;
  WindowAccess access = WindowAccess::kPut;
  uint64_t op = 0;
  uint64_t window = 0;
  uint64_t generation = 0;
  uint64_t base = 0;
  std::string text = {};
  std::string key = {};
  std::vector<Piece> pieces = {};
};

std::string encode(const Message& message);

// Raises LinkError. What follows the message is left in `rest`.
Message decode(std::string_view bytes, std::string_view* rest);

}  // namespace psrl::link::ucx
