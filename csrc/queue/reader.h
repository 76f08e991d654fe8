// Views of committed records, for one client.
#pragma once

#include <memory>

#include "queue/arena.h"
#include "queue/record.h"

namespace psrl {

// A record as it was committed. The bytes are valid as long as the lease lives, also when the row
// is cleared meanwhile.
struct RecordView {
  std::shared_ptr<Lease> lease;
  Description description;
  ConstBytes bytes;  // of the whole record; fields' offsets count from here
};

class QueueReader {
 public:
  QueueReader(std::shared_ptr<Arena> arena, ClientId client);

  // Raises UnknownKey if the record was freed or its extent given on: never another row's bytes.
  RecordView read(const RecordRef& ref) const;

 private:
  std::shared_ptr<Arena> arena_;
  ClientId client_;
};

}  // namespace psrl
