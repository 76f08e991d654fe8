// The process that made something. A fork of it has all of its memory, shares segments with it and
// runs none of its threads: what ends with a destructor there would end for the process it came
// from, or wait for a thread that is not. Forks happen by themselves: an event loop may run Python,
// its garbage collector too, between the fork and the exec of a subprocess.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace psrl {

class Maker {
 public:
  // Whether this is the process that made it, and no fork.
  bool here() const { return ::getpid() == pid_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = ::getpid();
};

template <typename T>
struct DeleteInMaker {
  Maker maker;
  void operator()(T* made) const {
    if (maker.here()) delete made;
  }
};

// Destroyed by the process that made it alone; in a fork it stays as it is.
template <typename T>
using Bound = std::unique_ptr<T, DeleteInMaker<T>>;

template <typename T, typename... Args>
Bound<T> make_bound(Args&&... args) {
  return Bound<T>(new T(std::forward<Args>(args)...));
}

}  // namespace psrl
