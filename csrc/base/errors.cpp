#include "base/errors.h"

#include <cerrno>
#include <system_error>

namespace psrl {

void throw_errno(const std::string& what) {
  const int code = errno;
  throw StorageError(what + ": " + std::generic_category().message(code));
}

}  // namespace psrl
