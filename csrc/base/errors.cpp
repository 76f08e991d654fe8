#include "base/errors.h"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>

namespace psrl {

std::string error_text(int code) {
  std::string text = std::generic_category().message(code);
  if (code == EMFILE) text += "; raise the limit of open files (ulimit -n)";
  if (code == ENFILE) text += "; raise the host's limit of open files (sysctl fs.file-max)";
  return text;
}

std::string memlock_advice() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return "; a process may lock " + std::to_string(limit.rlim_cur >> 10) +
         " KiB of memory here: raise it (ulimit -l unlimited)";
}

void throw_errno(const std::string& what) { throw StorageError(what + ": " + error_text(errno)); }

}  // namespace psrl
